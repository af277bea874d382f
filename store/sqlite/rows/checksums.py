"""A checksum in every row of measurements: a flipped bit that leaves a possible value is found by nothing else."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

COVERED: Final = ("series", "job", "epoch", "step", "duration_us", "memory_pressure", "measured_at_s")
"""Columns that it is made of, in this order."""
NEWEST_ROWS: Final = 200_000
"""So many are checked whenever a store is opened for writing, in half a second."""
ROWS_AT_A_TIME: Final = 20_000
"""So many are checked after each look at the pages while a store is written, the oldest of all in their turn, too."""
_REALS: Final = {"duration_us", "memory_pressure"}
_START: Final = np.uint64(0x9E3779B97F4A7C15)
_FACTOR: Final = np.uint64(0xD6E8FEB86659FD93)
"""Odd, so that no change of one column is lost on the way."""
_BLOCK_ROWS: Final = 50_000
_ALL: Final = 2**63 - 1
"""No id is greater."""


def checksums(columns: Sequence[ArrayLike]) -> NDArray[np.int64]:
    """Checksums of rows, each of 32 bits.

    Args:
        columns: values of COVERED, each of shape (n,) or a number; NaN stands for NULL.

    Returns:
        Shape (n,).
    """
    mixed = np.full(1, _START)
    for name, values in zip(COVERED, columns, strict=True):
        if name in _REALS:
            real = np.atleast_1d(np.asarray(values, np.float64)) + 0.0  # SQLite knows one zero
            bits = np.where(np.isnan(real), np.float64(-1.0), real).view(np.uint64)
        else:
            bits = np.atleast_1d(np.asarray(values, np.int64)).view(np.uint64)
        mixed = (mixed ^ bits) * _FACTOR  # the overflow is meant
        mixed = mixed ^ (mixed >> np.uint64(32))
    return np.asarray(mixed & np.uint64(0xFFFFFFFF), np.int64)


def agree(rows: Sequence[Sequence[Any]]) -> NDArray[np.bool_]:
    """Which rows hold what was written; those without a checksum are taken to.

    Args:
        rows: of COVERED and `checksum`, with sound cells.

    Returns:
        Shape (n,).
    """
    columns: list[Any] = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in (*COVERED, "checksum")]
    for at, name in enumerate(COVERED):
        if name in _REALS:
            columns[at] = np.array(columns[at], np.float64)  # None becomes NaN
    written = columns.pop()
    are_equal = np.equal(checksums(columns), np.array([-1 if one is None else one for one in written], np.int64))
    return np.logical_or(are_equal, np.array([one is None for one in written], np.bool_))


class ChecksumWatch:
    """Goes through all measurements of a store, a few at a time, from the newest to the oldest and again."""

    def __init__(self, sound: str) -> None:
        """`sound`: SQL, true of rows with sound cells."""
        self._sound = sound
        self._before = _ALL

    def check_some(self, connection: sqlite3.Connection) -> int:
        """Check the next ROWS_AT_A_TIME.

        Args:
            connection: the writer's, in autocommit mode.

        Returns:
            How many were wrong and are marked now.

        Raises:
            sqlite3.Error: they cannot be read, or not be marked now.
        """
        n_wrong, last = mark_wrong_rows(connection, self._sound, ROWS_AT_A_TIME, self._before)
        self._before = last or _ALL
        return n_wrong


def mark_wrong_rows(
    connection: sqlite3.Connection, sound: str, n_rows: int = NEWEST_ROWS, before: int = _ALL
) -> tuple[int, int]:
    """Mark measurements that do not hold what was written though each cell is possible.

    Their checksum becomes negative, which no sound row has; their other cells stay as they are.

    Args:
        connection: a writer's, in autocommit mode.
        sound: SQL, true of rows with sound cells.
        n_rows: so many, the newest first.
        before: only of those with smaller ids.

    Returns:
        How many were marked, and the smallest id that was looked at; 0 if there are no more.
    """
    wrong: list[int] = []
    last = 0
    rows = connection.execute(
        f"SELECT {','.join(COVERED)}, checksum, id FROM main.measurements WHERE id < ? AND {sound}"
        " ORDER BY id DESC LIMIT ?",
        (before, n_rows),
    )
    while block := rows.fetchmany(_BLOCK_ROWS):
        wrong += [block[at][-1] for at in np.flatnonzero(~agree([row[:-1] for row in block]))]
        last = block[-1][-1]
    if wrong:
        statement = "UPDATE main.measurements SET checksum = -1 - checksum WHERE id = ?"
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(statement, [(row,) for row in wrong])
        connection.execute("COMMIT")
    return len(wrong), last
