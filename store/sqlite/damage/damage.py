"""Damage that SQLite finds in a store's file while it is written, and what was recovered."""

from __future__ import annotations

import contextlib
import shlex
import sqlite3
import time
from pathlib import Path
from typing import Final

import msgspec

from ...counted import counted
from ...foreign.regular_file import begin_of
from ..file_kind import SQLITE_HEADER

EVERY_S: Final = 60.0
"""The shortest time between two checks of a store that is written."""
MOST_OF_TIME: Final = 0.01
"""Share of the writer's time that checks may take: large stores are checked less often."""
_DAMAGE: Final = {11: "malformed", 26: "not a database"}
_IO_ERROR: Final = {10: "disk I/O error"}
_PASSING: Final = {
    5: "is locked", 6: "is locked", 8: "readonly", 9: "interrupted", 13: "is full", 14: "unable to open",
    15: "locking protocol",
}  # fmt: skip
"""SQLite's codes and texts; Python 3.10 does not give the codes."""


class StoreDamage(sqlite3.DatabaseError):
    """SQLite can read the file, but tables or columns are missing."""


class Damage(msgspec.Struct, frozen=True):
    """Damage of a store's file."""

    error: str
    set_aside: Path
    """Path of the damaged file now."""
    n_recovered: int = 0
    """Its measurements that are in the new file."""
    n_missing: int | None = None
    """Its measurements that could not be read; None: their number cannot be read either."""

    @property
    def losses(self) -> str:
        """Recovered and lost measurements, in words."""
        lost = "an unknown number" if self.n_missing is None else f"{self.n_missing:,}"
        return f"{counted(self.n_recovered, 'measurement')} recovered, {lost} lost"


def remedy(path: Path) -> str:
    """The user's remedy for a damaged store, or for a file that is no store."""
    with contextlib.suppress(OSError):
        if begin_of(path, len(SQLITE_HEADER)) != SQLITE_HEADER:
            return "it is no store, or its beginning is lost: name another file, or a backup"
    named = shlex.quote(str(path))
    return f"`zerotune store repair {named}` keeps what is sound of it; end a daemon that has it open first"


def is_damage(error: BaseException) -> bool:
    """Whether an error means that the file itself is damaged, not that it cannot be used now."""
    return _is(error, _DAMAGE)


def is_io_error(error: BaseException) -> bool:
    """Whether the disk failed to read or write."""
    return _is(error, _IO_ERROR)


def is_passing(error: BaseException) -> bool:
    """Whether an error is temporary and says nothing about the file."""
    return _is(error, _PASSING)


def _is(error: BaseException, kinds: dict[int, str]) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    has_words = any(words in str(error) for words in kinds.values())
    return isinstance(error, sqlite3.DatabaseError) and (has_words if code is None else code & 0xFF in kinds)


def check_pages(connection: sqlite3.Connection) -> None:
    """Read all pages of tables; raises `sqlite3.DatabaseError` if SQLite cannot have written one of them."""
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(f"malformed: {found}")


class DamageWatch:
    """Checks a store's file from time to time, on the writer's thread; recording never waits for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._due_s = time.monotonic() + EVERY_S

    @property
    def due_in_s(self) -> float:
        """Seconds until the next check."""
        return max(0.0, self._due_s - time.monotonic())

    def look(self) -> sqlite3.DatabaseError | None:
        """The damage, if any, by an own connection: the writer's may hold sound copies of damaged pages."""
        started_s = time.monotonic()
        try:
            connection = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)
            try:
                check_pages(connection)
            finally:
                connection.close()
        except sqlite3.DatabaseError as error:
            return error if is_damage(error) else None
        except MemoryError:
            return None
        finally:
            took_s = time.monotonic() - started_s
            self._due_s = time.monotonic() + max(EVERY_S, took_s / MOST_OF_TIME)
        return None
