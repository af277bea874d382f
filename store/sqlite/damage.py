"""Damage that SQLite finds in a store's file while it is written, and what became of it."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Final

import msgspec

EVERY_S: Final = 60.0
"""How often a store that is written is looked through, at most."""
MOST_OF_TIME: Final = 0.01
"""Share of the writer's time that this may take: large stores are looked through less often."""
_CODES: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Damage(msgspec.Struct, frozen=True):
    """What was wrong with a store's file."""

    error: str
    """SQLite's words."""
    set_aside: Path
    """Where the file is kept."""
    n_recovered: int = 0
    """Measurements of it that are in the new file."""
    n_missing: int | None = None
    """Measurements of it that could not be read; None: how many there were cannot be read either."""

    @property
    def losses(self) -> str:
        """In words."""
        lost = "an unknown number" if self.n_missing is None else f"{self.n_missing:,}"
        return f"{self.n_recovered:,} measurements recovered, {lost} lost"


def is_damage(error: BaseException) -> bool:
    """Whether an error says that the file itself is damaged, not that it cannot be used now."""
    return isinstance(error, sqlite3.DatabaseError) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _CODES


def check_pages(connection: sqlite3.Connection) -> None:
    """Read all pages.

    Raises:
        sqlite3.DatabaseError: one of them cannot be what SQLite wrote.
    """
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        error = sqlite3.DatabaseError(verdict)
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


class DamageWatch:
    """Looks through a store's file from time to time, on the writer's thread: whoever records only queues."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._due_s = time.monotonic() + EVERY_S

    @property
    def due_in_s(self) -> float:
        """Seconds until it is time to look."""
        return max(0.0, self._due_s - time.monotonic())

    def look(self) -> sqlite3.DatabaseError | None:
        """What is wrong, on a connection of its own: the writer's may hold sound copies of damaged pages."""
        started_s = time.monotonic()
        try:
            connection = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)
            try:
                check_pages(connection)
            finally:
                connection.close()
        except sqlite3.DatabaseError as error:
            return error if is_damage(error) else None
        finally:
            took_s = time.monotonic() - started_s
            self._due_s = time.monotonic() + max(EVERY_S, took_s / MOST_OF_TIME)
        return None
