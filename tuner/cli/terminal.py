"""Filters output: names of jobs, hosts, fabrics and files come from others and must not control the terminal.

All output passes through this module: `filtered_output` for prints, `shown` for rich. Control characters, marks of
writing direction and halves of surrogates are shown by four hexadecimal digits, as in JSON.
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
"""Most columns or rows of a terminal: output for more would take minutes."""

_STEERING: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # all control characters except tab and line feed
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"  # writing direction, line separators, byte-order mark
    "\ud800-\udfff"  # bytes of file names that cannot be decoded
)
_ESCAPED: Final = re.compile(f"[{_STEERING}]")
_COLOURS: Final = re.compile(r"(\x1b\[(?:(?:0|[1-4]|2[2-4]|39|3[1-7]|9[0-7])(?:;|(?=m)))*m)")
"""Colours in typer's messages: of letters only, not black, and without background."""

_LONG: Final = re.compile(r"(?<=(?<!\w)')[^']{257,}(?=')|[^\s']{257,}")
"""A quoted value, or a word."""


def shown(text: str) -> str:
    """`text` with visible escapes for everything that controls a terminal."""
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def shortened(text: str) -> str:
    """`text` without the middle of each value that is longer than any file name."""
    return _LONG.sub(lambda found: f"{found[0][:60]}... ({len(found[0]):,} characters) ...{found[0][-20:]}", text)


def forget_absurd_size() -> None:
    """Remove an impossible size of the terminal from the environment."""
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        text = os.environ.get(name, "")
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_SIDE)) and 0 < int(text) <= MAX_SIDE):
            os.environ.pop(name, None)


class _Filtered:
    """A text stream that passes colours, but nothing else that controls a terminal.

    rich's consoles filter by themselves and write to `unfiltered`, since they move the cursor.
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
    """While it is open, output to stdout and stderr is filtered; output to a closed stream is dropped.

    Characters that the terminal's encoding lacks are shown escaped.
    """
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        streams = [stream or nowhere for stream in before]  # None: the parent process closed it
        for stream in streams:
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        sys.stdout, sys.stderr = (cast(TextIO, _Filtered(stream)) for stream in streams)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
