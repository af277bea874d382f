"""Operations committed since the store's file was last found sound, to be repeated if it is damaged."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

Operation = Callable[[sqlite3.Connection], None]

MOST_ROWS: Final = 100_000
"""Rows that are kept in memory (some 5 MB); the oldest are dropped first."""


class Entry(NamedTuple):
    """An operation that is queued or was written."""

    operation: Operation
    n_rows: int
    room: int
    """Its memory in rows; long rows count as several."""


class Marks(NamedTuple):
    """Newest row ids of the tables that only grow; later operations wrote rows with higher ids."""

    measurement: int
    decision: int


class RecentOperations:
    """The kept operations; only the writer's thread uses them."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Marks, Entry]] = deque()
        self._room = 0

    @staticmethod
    def marks(connection: sqlite3.Connection) -> Marks:
        """The tables' newest row ids at the beginning of a transaction."""
        found = connection.execute(
            "SELECT (SELECT coalesce(max(id), 0) FROM main.measurements),"
            " (SELECT coalesce(max(id), 0) FROM main.decisions)"
        )
        return Marks(*found.fetchone())

    def committed(self, marks: Marks, entries: Iterable[Entry]) -> None:
        """Keep the operations of a committed transaction."""
        for entry in entries:
            self._kept.append((marks, entry))
            self._room += entry.room
        while self._room > MOST_ROWS:
            marks, entry = self._kept.popleft()
            self._room -= entry.room
            while self._kept and self._kept[0][0] == marks:  # a transaction's operations are kept or dropped together
                self._room -= self._kept.popleft()[1].room

    def forget(self) -> None:
        """Drop all operations, as the file was found sound."""
        self._kept.clear()
        self._room = 0

    def redo(self, connection: sqlite3.Connection) -> int:
        """Repeat the operations in a new file, after deleting their recovered rows.

        Returns how many measurements this adds to the recovered ones.
        """
        if not self._kept:
            return 0
        connection.execute("BEGIN IMMEDIATE")
        try:
            n_before = _count(connection)
            marks = self._kept[0][0]
            cut = connection.execute("DELETE FROM main.measurements WHERE id > ?", (marks.measurement,)).rowcount
            connection.execute("UPDATE tallies SET n_rows = n_rows - ? WHERE name = 'measurements'", (cut,))
            connection.execute("DELETE FROM main.decisions WHERE id > ?", (marks.decision,))
            for _, entry in self._kept:
                entry.operation(connection)
            n_more = _count(connection) - n_before
            connection.execute("COMMIT")
        except Exception as error:
            connection.execute("ROLLBACK")
            if isinstance(error, (sqlite3.OperationalError, MemoryError)):
                raise
            return 0  # the recovered rows stay
        return n_more


def _count(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM main.measurements").fetchone()[0])
