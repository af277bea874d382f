"""What is sound of a store and what is damaged, in numbers; and a fresh store with what is sound.

What is sound is what a recovery finds, so that `check` tells before what `repair` keeps.
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
from .damage.damage import SQLITE_HEADER
from .damage.recovery import Recovered, reading, recover
from .damage.replacement import unfinished
from .migrations import APPLICATION_ID, migrate
from .opening import held, open_unchecked, replace
from .schema import stranger

_SHOWN: Final = 5
_AT_APPLICATION_ID: Final = 68
"""In the header: section 1.3 of SQLite's file format."""


class TableSoundness(msgspec.Struct, frozen=True):
    """Rows of one table."""

    n_sound: int
    n_damaged: int | None
    """That cannot be read, or hold what no such cell may; None: nobody knows."""


class Soundness(msgspec.Struct, frozen=True):
    """A store's state."""

    problems: tuple[str, ...]
    """SQLite's words, the first of them."""
    tables: dict[str, TableSoundness]
    stand_ins: int
    """Jobs and fabrics that other rows refer to and that are lost. A repair makes a row for each, named recovered-ID: a
    job has no start and no number of ranks then, a fabric no description."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.problems and not self.stand_ins and all(one.n_damaged == 0 for one in self.tables.values())


class Repair(msgspec.Struct, frozen=True):
    """What a repair found, and did."""

    found: Soundness
    kept: Path | None
    """Where the damaged file is; None: the store is sound and was left alone."""


def check(path: Path) -> Soundness:
    """Read all of a store, at one moment of it if a daemon writes it; nothing is changed.

    Args:
        path: of the store, or of a damaged one that was set aside.

    Raises:
        StoreError: there is no store, or nothing of one in it, or another application's database, or nobody can read
            it now.
        StoreVersionError: a newer zerotune wrote it.
    """
    path = Path(os.path.realpath(path))
    try:
        with tempfile.TemporaryDirectory(prefix="zerotune-check-") as folder:
            found = _check(copy := _copy(path, Path(folder) / path.name))
            if not (any(table.n_sound for table in found.tables.values()) or _begins_as_ours(copy)):
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
    """Put a fresh store with what is sound into a damaged one's place; the damaged file is kept beside it.

    Until the fresh one is complete the damaged one stays as it is. A sound store is left alone.

    Args:
        path: of the store, or of a damaged one that was set aside.

    Returns:
        What was found, and where the damaged file is now.

    Raises:
        StoreError: there is no store, or nothing of one in it, or another application's database, or no room for a
            fresh one.
        StoreLockedError: a daemon, or another process, has it open for writing.
        StoreVersionError: a newer zerotune wrote it.
    """
    path = Path(os.path.realpath(path))
    if unfinished(path) is None:
        open_unchecked(path).close()  # refuses what is no store before a lock file is made
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
    """A copy of one moment without a log, of all pages as they are; of file and log if SQLite cannot copy them."""
    try:
        with contextlib.closing(open_unchecked(path)) as source, contextlib.closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.DatabaseError:  # its first page is damaged, say
        shutil.copyfile(path, target)
        if (log := path.with_name(path.name + "-wal")).exists():
            shutil.copyfile(log, target.with_name(target.name + "-wal"))
    return target


def _begins_as_ours(path: Path) -> bool:
    """Whether a file has the header of a store, as an empty one has."""
    begin = begin_of(path, _AT_APPLICATION_ID + 4)
    ours = APPLICATION_ID.to_bytes(4, "big")
    return begin.startswith(SQLITE_HEADER) and begin[_AT_APPLICATION_ID:] == ours


def _check(copy: Path) -> Soundness:
    problems = list[str]()
    with contextlib.closing(reading(copy)) as connection:
        try:
            if found := stranger(connection):
                problems.append(f"the schema has {found}")
            else:  # else it would compute what the schema asks for
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
