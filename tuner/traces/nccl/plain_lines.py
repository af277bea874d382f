"""Lines as nccl-tests printed them, without the additions of launchers, loggers and terminals before and around them.

No launchers are listed here. nccl-tests begins the lines of its header with `#`, so anything before is an addition.
The same addition is removed from the following lines, with any numbers and names in it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import msgspec

_HEADER: Final = re.compile(
    rb"(?m)^([^\n#]{0,200})#(?= *(?:nThread|nccl-tests|Collective test|Using devices|Rank +\d|size +count))"
)
_PARTS: Final = re.compile(rb"[\w.-]+| +|.")
_NUMBER: Final = rb"[\d.-]{1,99}"
_NAME: Final = rb"(?=[\d.-]{0,99}[A-Za-z_])[\w.-]{1,99}"
"""A word that is no number, so that the first number of a plain row is not read as a name."""
_ESCAPE: Final = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
_TAG_INSIDE: Final = re.compile(rb"\[(?:[\w.-]+@)?\d+,\d+\]<std(?:out|err)>:? ?")
"""mpirun tags each write: nccl-tests writes a row in parts, and a full buffer ends within a number."""
_JSON: Final = re.compile(rb'(?m)^\{"[^\n]*\}$')
_TEXT_KEYS: Final = ("log", "line", "message", "MESSAGE")
"""Keys of the line in the JSON of Docker, Loki, usual loggers and journald."""


class PlainLines:
    """Reads a file's pieces, and keeps the additions before its lines."""

    def __init__(self) -> None:
        self._before: re.Pattern[bytes] | None = None

    def of(self, chunk: bytes) -> bytes:
        """The piece without additions; its lines keep their order."""
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b'{"' in chunk:
            chunk = _JSON.sub(_text, chunk)
        if b"\x1b" in chunk:
            chunk = _ESCAPE.sub(b"", chunk)
        chunk = chunk.replace(b"\xc2\xa0", b" ")  # browsers copy this for a space
        plain, at = [], 0
        for header in _HEADER.finditer(chunk) if b"#" in chunk else ():
            before = _before_each(header[1])
            if before is not self._before:
                plain.append(self._without(chunk[at : header.start()]))
                at, self._before = header.start(), before
        return b"".join((*plain, self._without(chunk[at:])))

    def _without(self, text: bytes) -> bytes:
        return text if self._before is None else _TAG_INSIDE.sub(b"", self._before.sub(b"", text))


@lru_cache(maxsize=64)
def _before_each(example: bytes) -> re.Pattern[bytes] | None:
    """A pattern of the additions like `example`; None: they are only spaces."""
    body, n_after = example.strip(b" "), len(example) - len(example.rstrip(b" "))
    if not body:
        return None
    parts = [
        (_NAME if re.search(rb"[A-Za-z_]", part) else _NUMBER)
        if re.match(rb"[\w.-]", part)
        else rb" {1,99}"
        if part.startswith(b" ")
        else re.escape(part)
        for part in _PARTS.findall(body)
    ]
    return re.compile(rb"(?m)^ *%b {0,%d}" % (b"".join(parts), n_after))


def _text(line: re.Match[bytes]) -> bytes:
    """The text in a line of JSON; the line itself if it has none."""
    try:
        entry = msgspec.json.decode(line[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return line[0]
    text = next((found for key in _TEXT_KEYS if isinstance(found := entry.get(key), str)), None)
    return line[0] if text is None else text.removesuffix("\n").encode("utf-8", "replace")
