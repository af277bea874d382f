"""Reads CSV as in RFC 4180 (quoted fields, which may have line breaks), in bounded pieces."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ...store.errors import TraceError
from .files import MAX_LINE_BYTES, line_chunks
from .records import Summary

_MAX_SHOWN: Final = 60
_UNIT: Final = re.compile(r"\([^)]*\)")
_COMMENT: Final = re.compile(rb"(?m)^#[^\n]*")
_UNREADABLE: Final = re.compile("\0|\r(?!\n)")


def csv_chunks(path: Path, summary: Summary | None = None) -> Iterator[tuple[int, bytes]]:
    """The file in pieces that end where a row ends, each with the number of its first line.

    Raises TraceError if a quote is not closed for too long.
    """
    first_line, held = 1, b""
    for chunk in line_chunks(path, summary):
        held += chunk
        if b'"' in held and _COMMENT.sub(b"", held).count(b'"') % 2:
            if len(held) > MAX_LINE_BYTES:
                line = _line_of_quote(held, first_line)
                raise TraceError(f"{path}, line {line}: the quote is not closed", 'close it with ", or remove it')
            continue
        yield first_line, held
        first_line += held.count(b"\n")
        held = b""
    if held:
        yield first_line, held  # truncated: yield what can be read


def rows_of(text: bytes, path: Path) -> list[list[str]]:
    """The rows of a piece; comments and blank lines give empty rows, so that lines can be counted."""
    if b"#" in text:
        text = _COMMENT.sub(b"", text)
    words = io.StringIO(_UNREADABLE.sub("\ufffd", text.decode("utf-8", "replace")), newline="")
    try:
        return list(csv.reader(words, skipinitialspace=True))
    except csv.Error as error:
        raise TraceError(f"{path} is no CSV: {error}", "write it again, with commas and closed quotes") from None


def cells_of(line: str) -> list[str]:
    """The cells of one line."""
    try:
        return next(csv.reader([line], skipinitialspace=True), [])
    except csv.Error:
        return []


def header_cells(line: str) -> list[str]:
    """The columns that a header names, in lower case, without units in brackets; a comment may introduce them."""
    names = [_UNIT.sub("", name).strip().lower() for name in cells_of(line.lstrip("# "))]
    if names and line.lstrip().startswith("#"):
        names[0] = names[0].rpartition(":")[2].strip()
    return names


def value_in(name: str, text: str) -> str:
    """A column's value as text, shortened: a file may have values of any length."""
    return f"{name} {text[:_MAX_SHOWN]!r}"


def numbered(rows: Sequence[Sequence[str]], first_line: int) -> Iterator[tuple[int, Sequence[str]]]:
    """The rows, each with the number of its first line."""
    for row in rows:
        yield first_line, row
        first_line += 1 + sum(cell.count("\n") for cell in row)


def numbered_rows(path: Path, summary: Summary) -> Iterator[tuple[int, Sequence[str]]]:
    """The file's rows that are not empty, each with the number of its first line; raises as `csv_chunks`."""
    for first_line, chunk in csv_chunks(path, summary):
        yield from ((line, row) for line, row in numbered(rows_of(chunk, path), first_line) if row)


def _line_of_quote(text: bytes, first_line: int) -> int:
    """Number of the first line whose quotes do not match."""
    for at, line in enumerate(text.split(b"\n")):
        if not line.startswith(b"#") and line.count(b'"') % 2:
            return first_line + at
    return first_line
