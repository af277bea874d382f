"""A checksum in every step and decision: few rows, each of other types, checked one by one."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from zerotune.store.sqlite.rows.job_rows import DECISION_COLUMNS

COVERED: Final = {
    "steps": ("job", "step", "epoch", "duration_us", "exposed_us", "memory_pressure"),
    "decisions": ("job", "fabric", *DECISION_COLUMNS),
}
"""By table, the columns that it is made of, in this order."""
NEWEST_ROWS: Final = 10_000
"""So many of each table are checked whenever a store is opened for writing."""
_KEYS: Final = {"steps": ("job", "step"), "decisions": ("id",)}


Stored = str | bytes | float | None
"""What a column holds; whole numbers are floats to types."""


def row_checksum(values: Iterable[Stored]) -> int:
    """A checksum of 32 bits, the same before SQLite stores the values and after it has read them again."""
    return zlib.crc32(msgspec.msgpack.encode([_stored(value) for value in values]))


def fits(row: Sequence[Any]) -> bool:
    """Whether a row of COVERED and `checksum` holds what was written; one without a checksum is taken to."""
    *values, written = row
    return written is None or row_checksum(values) == written


def mark_wrong_records(connection: sqlite3.Connection, table: str, sound: str) -> None:
    """Mark rows that do not hold what was written though each cell is possible, as `mark_wrong_rows` does.

    Args:
        connection: a writer's, in autocommit mode.
        table: one of COVERED.
        sound: SQL, true of rows with sound cells.
    """
    keys = _KEYS[table]
    text_factory, connection.text_factory = connection.text_factory, bytes  # damaged text cannot be decoded
    try:
        rows = connection.execute(
            f"SELECT {','.join(keys)}, {','.join(COVERED[table])}, checksum FROM main.{table} WHERE {sound}"
            f" ORDER BY {','.join(f'{key} DESC' for key in keys)} LIMIT {NEWEST_ROWS}"
        )
        wrong = [row[: len(keys)] for row in rows if not fits(row[len(keys) :])]
    finally:
        connection.text_factory = text_factory
    if wrong:
        where = " AND ".join(f"{key} = ?" for key in keys)
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(f"UPDATE main.{table} SET checksum = -1 - checksum WHERE {where}", wrong)
        connection.execute("COMMIT")


def _stored(value: Stored) -> bytes | float | None:
    if isinstance(value, str):
        return value.encode()
    if value is None or isinstance(value, bytes):
        return value
    number = float(value) + 0.0  # SQLite knows one zero, and no NaN
    return None if number != number else number
