"""Counts a store's sound and damaged rows, and repairs it by a new store with the sound rows.

Rows are sound if a recovery finds them, so `check` reports what `repair` would keep.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from ..errors import StoreError, reason
from ..foreign.regular_file import begin_of
from .damage.recovery import Recovered, reading, recover
from .damage.replacement import unfinished
from .file_kind import SQLITE_HEADER
from .migrations import APPLICATION_ID, migrate
from .opening import held, open_unchecked, replace
from .schema import stranger

_SHOWN: Final = 5
_AT_APPLICATION_ID: Final = 68
"""Offset in the header, by section 1.3 of SQLite's file format."""


class TableSoundness(msgspec.Struct, frozen=True):
    """Rows of one table."""

    n_sound: int
    n_damaged: int | None
    """Rows that cannot be read, or have an impossible cell; None: unknown."""


class Soundness(msgspec.Struct, frozen=True):
    """A store's state."""

    problems: tuple[str, ...]
    """SQLite's first messages."""
    tables: dict[str, TableSoundness]
    stand_ins: int
    """Jobs and fabrics that other rows refer to and that are lost. A repair makes a row for each, named recovered-ID: a
    job has no start and no number of ranks then, a fabric no description."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.problems and not self.stand_ins and all(one.n_damaged == 0 for one in self.tables.values())


class Repair(msgspec.Struct, frozen=True):
    """Result of a repair."""

    found: Soundness
    kept: Path | None
    """Path of the damaged file; None: the store is sound and was not changed."""


def check(path: Path) -> Soundness:
    """Read a whole store without changing it; if a daemon writes it, its state at one moment.

    The path may be that of a damaged store that was set aside.

    Raises:
        StoreError: there is no store, the file has no part of one, it is another application's database, or it cannot
            be read now.
        StoreVersionError: a newer zerotune wrote it.
    """
    path = Path(os.path.realpath(path))
    try:
        with tempfile.TemporaryDirectory(prefix="zerotune-check-") as folder:
            found = _check(copy := _copy(path, Path(folder) / path.name))
            if not (any(table.n_sound for table in found.tables.values()) or _has_store_header(copy)):
                raise StoreError(
                    f"nothing in {path} is of a zerotune store",
                    "if it was one, nothing of it can be saved: move it away, and the next daemon begins a new one; "
                    "otherwise name another file",
                )
            return found
    except (sqlite3.Error, OSError, MemoryError) as error:
        why = reason(error)
        raise StoreError(f"store {path} cannot be checked: {why}", "try again, or name another file") from error


def repair(path: Path) -> Repair:
    """Put a new store with the sound rows in a damaged one's place; the damaged file is kept beside it.

    The damaged store stays in its place until the new one is complete. A sound store is not changed.

    Raises:
        StoreError: as `check`, or a new store has no room.
        StoreLockedError: a daemon, or another process, has it open for writing.
        StoreVersionError: a newer zerotune wrote it.
    """
    path = Path(os.path.realpath(path))
    if unfinished(path) is None:
        open_unchecked(path).close()  # refuses a file that is no store before making a lock file
    with held(path):
        if (found := check(path)).is_sound:
            return Repair(found, None)
        try:
            connection, kept, recovered = replace(path)
            connection.close()
        except (sqlite3.Error, OSError, MemoryError) as error:
            why = reason(error)
            raise StoreError(f"store {path} cannot be repaired: {why}", "make room there, then try again") from error
    return Repair(found if recovered is None else _soundness(found.problems, recovered), kept)


def _copy(path: Path, target: Path) -> Path:
    """A copy of all pages at one moment, without a log; a copy of file and log if SQLite cannot do that."""
    try:
        with contextlib.closing(open_unchecked(path)) as source, contextlib.closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.DatabaseError:  # its first page is damaged, say
        shutil.copyfile(path, target)
        if (log := path.with_name(path.name + "-wal")).exists():
            shutil.copyfile(log, target.with_name(target.name + "-wal"))
    return target


def _has_store_header(path: Path) -> bool:
    """Whether a file has the header of a store, as an empty one has."""
    begin = begin_of(path, _AT_APPLICATION_ID + 4)
    application_id = APPLICATION_ID.to_bytes(4, "big")
    return begin.startswith(SQLITE_HEADER) and begin[_AT_APPLICATION_ID:] == application_id


def _check(copy: Path) -> Soundness:
    problems = list[str]()
    with contextlib.closing(reading(copy)) as connection:
        try:
            if found := stranger(connection):
                problems.append(f"the schema has {found}")
            else:  # else reading could execute code of the schema
                problems = [words for (words,) in connection.execute("PRAGMA integrity_check") if words != "ok"]
        except sqlite3.DatabaseError as error:
            problems.append(str(error))
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as target:
        migrate(target)
        recovered = recover(copy, target)
    words = [line for problem in problems for line in problem.splitlines() if not line.startswith("***")]
    return _soundness(tuple(words[:_SHOWN]), recovered)


def _soundness(problems: tuple[str, ...], found: Recovered) -> Soundness:
    tables = {
        name: TableSoundness(rows.n_sound, None if rows.n_rows is None else max(0, rows.n_rows - rows.n_sound))
        for name, rows in found.tables.items()
    }
    return Soundness(problems, tables, found.stand_ins)
