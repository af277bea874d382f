"""What the command prints: names of jobs, hosts, fabrics and files come from others, and must not steer a terminal.

All output passes through here: `filtered_output` for what is printed, `shown` for what rich draws. Control characters,
marks of writing direction and halves of surrogates are shown by their four digits, as JSON writes them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final, TextIO, cast

MAX_SIDE: Final = 5000
"""Letters in a row, or rows, of any terminal: what is drawn for more takes minutes."""

_STEERING: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # all control characters but tab and line feed
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"  # writing direction, line separators, byte-order mark
    "\ud800-\udfff"  # bytes of file names that are no text
)
_ESCAPED: Final = re.compile(f"[{_STEERING}]")
_COLOURS: Final = re.compile(r"(\x1b\[(?:(?:0|[1-4]|2[2-4]|39|3[1-7]|9[0-7])(?:;|(?=m)))*m)")
"""As typer's messages have them: of letters, none of which is black, and of nothing behind them."""

_LONG: Final = re.compile(r"(?<=(?<!\w)')[^']{257,}(?=')|[^\s']{257,}")
"""A quoted value, or a word."""


def shown(text: str) -> str:
    """`text` with everything that steers a terminal made visible."""
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def shortened(text: str) -> str:
    """`text` with its middle left out of each value that is longer than any name of a file."""
    return _LONG.sub(lambda found: f"{found[0][:60]}... ({len(found[0]):,} characters) ...{found[0][-20:]}", text)


def forget_absurd_size() -> None:
    """Remove from the environment what it says of the terminal's size, where no terminal has that one."""
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        said = os.environ.get(name, "")
        if not (said.isascii() and said.isdigit() and len(said) <= len(str(MAX_SIDE)) and 0 < int(said) <= MAX_SIDE):
            os.environ.pop(name, None)


class _Filtered:
    """A text stream that lets colours through and nothing else that steers a terminal.

    rich filters by itself and writes to `unfiltered`, since it moves the cursor.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)

    def write(self, text: str) -> int:
        parts = _COLOURS.split(text) if "\x1b" in text else [text]
        self.unfiltered.write("".join(part if at % 2 else shown(part) for at, part in enumerate(parts)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


@contextlib.contextmanager
def filtered_output() -> Iterator[None]:
    """While it is open, what is printed to stdout and stderr is filtered; a closed one swallows it.

    Names that the terminal's encoding does not have are shown escaped.
    """
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        streams = [stream or nowhere for stream in before]  # None: closed by who started us
        for stream in streams:
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        sys.stdout, sys.stderr = (cast(TextIO, _Filtered(stream)) for stream in streams)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
