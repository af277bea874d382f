"""The checksum of one row of a small table, also of one that changes."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

_NOT_WRONG: Final = "(checksum IS NULL OR checksum BETWEEN 0 AND 4294967295)"
Stored = str | bytes | float | None
"""What a column holds; whole numbers are floats to types."""


def row_checksum(values: Iterable[Stored]) -> int:
    """A checksum of 32 bits, the same before SQLite stores the values and after it has read them again."""
    return zlib.crc32(msgspec.msgpack.encode([_stored(value) for value in values]))


def seal(connection: sqlite3.Connection, table: str, columns: Sequence[str], ids: Iterable[int]) -> None:
    """Give rows the checksum of what they hold now; those that were found to be wrong stay so.

    Args:
        connection: in a transaction that writes.
        table: of the rows.
        columns: that the checksum is made of.
        ids: of the rows, just changed.
    """
    text_factory, connection.text_factory = connection.text_factory, bytes  # damaged text cannot be decoded
    try:
        for row in ids:
            found = connection.execute(
                f"SELECT {','.join(columns)} FROM main.{table} WHERE id = ? AND {_NOT_WRONG}", (row,)
            ).fetchone()
            if found is not None:
                connection.execute(f"UPDATE main.{table} SET checksum = ? WHERE id = ?", (row_checksum(found), row))
    finally:
        connection.text_factory = text_factory


def _stored(value: Stored) -> bytes | float | None:
    if isinstance(value, str):
        return value.encode()
    if value is None or isinstance(value, bytes):
        return value
    number = float(value) + 0.0  # SQLite knows one zero, and no NaN
    return None if number != number else number
