"""What was committed since the store's file was last seen to be sound, to be done again if it proves to be damaged."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

Operation = Callable[[sqlite3.Connection], None]

MOST_ROWS: Final = 100_000
"""So many are kept in memory, some 5 MB; the oldest go first."""


class Entry(NamedTuple):
    """What is to be written, or was."""

    operation: Operation
    n_rows: int
    room: int
    """Rows that take as much memory: more than it has, if they are long."""


class Marks(NamedTuple):
    """The newest rows of the tables that only grow: what is newer was written by the operations after it."""

    measurement: int
    decision: int


class RecentOperations:
    """Belongs to the writer's thread."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Marks, Entry]] = deque()
        self._room = 0

    @staticmethod
    def marks(connection: sqlite3.Connection) -> Marks:
        """Where the tables end, at the beginning of a transaction."""
        found = connection.execute(
            "SELECT (SELECT coalesce(max(id), 0) FROM main.measurements),"
            " (SELECT coalesce(max(id), 0) FROM main.decisions)"
        )
        return Marks(*found.fetchone())

    def committed(self, marks: Marks, entries: Iterable[Entry]) -> None:
        """Keep what a transaction has done."""
        for entry in entries:
            self._kept.append((marks, entry))
            self._room += entry.room
        while self._room > MOST_ROWS:
            marks, entry = self._kept.popleft()
            self._room -= entry.room
            while self._kept and self._kept[0][0] == marks:  # of one transaction, all or none
                self._room -= self._kept.popleft()[1].room

    def forget(self) -> None:
        """The file is sound with all of it."""
        self._kept.clear()
        self._room = 0

    def redo(self, connection: sqlite3.Connection) -> int:
        """Do it again in a new file, in place of what was recovered of it.

        Returns:
            By how many measurements there are more than were recovered.

        Raises:
            sqlite3.OperationalError: the new file cannot be written.
            MemoryError: so it is.
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
            return 0  # what was recovered is better than nothing
        return n_more


def _count(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM main.measurements").fetchone()[0])
