"""Rows of the small tables, each with a checksum of its own: few rows, of many types, checked one by one."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from zerotune.store.sqlite.rows.job_rows import DECISION_COLUMNS, FABRIC_COLUMNS, JOB_COLUMNS
from zerotune.store.sqlite.rows.measurements import SERIES_COLUMNS
from zerotune.store.sqlite.rows.sealing import row_checksum, seal

COVERED: Final = {
    "fabrics": FABRIC_COLUMNS,
    "jobs": JOB_COLUMNS,
    "series": SERIES_COLUMNS,
    "steps": ("job", "step", "epoch", "duration_us", "exposed_us", "memory_pressure"),
    "decisions": ("job", "fabric", *DECISION_COLUMNS),
}
"""By table, the columns that it is made of, in this order."""
NEWEST_ROWS: Final = 10_000
"""So many of each table are checked whenever a store is opened for writing."""
_KEYS: Final = {"steps": ("job", "step")}
"""Tables whose rows are told apart by these columns; all others by `id`."""
_SEALED_LATER: Final = ("fabrics", "jobs", "series")
"""Tables with rows of older versions, or made in the place of lost ones, that have no checksum yet."""


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
    keys = _KEYS.get(table, ("id",))
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


def seal_the_rest(connection: sqlite3.Connection) -> None:
    """Give a checksum to rows that lack one, but for those of tables with many.

    Args:
        connection: a writer's, in autocommit mode.
    """
    for table in _SEALED_LATER:
        if ids := [row for (row,) in connection.execute(f"SELECT id FROM main.{table} WHERE checksum IS NULL")]:
            connection.execute("BEGIN IMMEDIATE")
            seal(connection, table, COVERED[table], ids)
            connection.execute("COMMIT")

