"""What is sound of a store and what is damaged, in numbers; and a fresh store with what is sound.

What is sound is what a salvage finds, so that `check` tells before what `repair` keeps.
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

from zerotune.store.errors import StoreError, reason
from zerotune.store.sqlite.damage.damage import is_damage, is_io_error
from zerotune.store.sqlite.damage.pages import PAGE_BYTES, damaged_pages, read_pages
from zerotune.store.sqlite.damage.replacement import free_stamp, remove, unfinished
from zerotune.store.sqlite.damage.salvage import Salvaged, salvage
from zerotune.store.sqlite.migrations import APPLICATION_ID, migrate
from zerotune.store.sqlite.opening import held, open_unchecked, replace, write_sound_rows
from zerotune.store.sqlite.schema import guarded, stranger

_SHOWN: Final = 5
_AT_APPLICATION_ID: Final = 68
"""In the header: section 1.3 of SQLite's file format."""
_TRIES: Final = 3


class TableSoundness(msgspec.Struct, frozen=True):
    """Rows of one table."""

    n_sound: int
    n_damaged: int | None
    """That cannot be read, hold what no such cell may, or do not fit their checksum; None: nobody knows."""


class Soundness(msgspec.Struct, frozen=True):
    """A store's state."""

    n_pages: int
    n_damaged_pages: int | None
    """Pages that cannot be what SQLite wrote; None: not even the schema can be read."""
    problems: tuple[str, ...]
    """SQLite's words, the first of them."""
    tables: dict[str, TableSoundness]
    stand_ins: dict[str, int]
    """Jobs and fabrics that other rows refer to and that are lost. A repair makes a row for each, by the name that an
    index has, or else recovered-ID: a job has no start and no number of ranks then, a fabric no description."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        rows_are_sound = all(table.n_damaged == 0 for table in self.tables.values())
        return rows_are_sound and self.n_damaged_pages == 0 and not self.problems and not any(self.stand_ins.values())


class Repair(msgspec.Struct, frozen=True):
    """What a repair found, and did."""

    found: Soundness
    kept: Path | None
    """Where the damaged file is; None: the store is sound and was left alone."""


def check(path: Path) -> Soundness:
    """Read all of a store, at one moment of it if a daemon writes it; nothing is changed.

    Args:
        path: of the store, or of a damaged one that was set aside.

    Returns:
        What was found.

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
    with held(path) as lock:
        if (found := check(path)).is_sound:
            return Repair(found, None)
        try:
            stamp = free_stamp(path)
            salvaged = write_sound_rows(path, stamp, lock)
            connection, kept = replace(path, stamp, lock)
            connection.close()
        except (sqlite3.Error, OSError, MemoryError) as error:
            why = reason(error)
            raise StoreError(f"store {path} cannot be repaired: {why}", "make room there, then try again") from error
    return Repair(msgspec.structs.replace(found, tables=_tables(salvaged), stand_ins=salvaged.stand_ins), kept)


def _copy(path: Path, target: Path) -> Path:
    """A copy of one moment without a log: of all pages as they are, sound or not."""
    with contextlib.closing(open_unchecked(path)) as source:
        for _ in range(_TRIES):
            try:
                with contextlib.closing(sqlite3.connect(target)) as copy:
                    source.backup(copy)
                    copy.execute("PRAGMA journal_mode = DELETE")
                return target
            except sqlite3.DatabaseError as error:
                remove(target)
                if is_damage(error):
                    break
                if not is_io_error(error):
                    raise
    # Its first page is damaged, or the disk has lost a sector.
    target.write_bytes(b"".join(read_pages(path)))
    log, logged = path.with_name(path.name + "-wal"), target.with_name(target.name + "-wal")
    if log.exists():
        shutil.copyfile(log, logged)
    return target


def _begins_as_ours(path: Path) -> bool:
    """Whether a file has the header of a store, as an empty one has."""
    with path.open("rb") as file:
        begin = file.read(_AT_APPLICATION_ID + 4)
    ours = APPLICATION_ID.to_bytes(4, "big")
    return begin.startswith(b"SQLite format 3\0") and begin[_AT_APPLICATION_ID:] == ours


def _check(copy: Path) -> Soundness:
    n_damaged_pages, problems = None, list[str]()
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        try:
            guarded(connection)
            n_damaged_pages = len(damaged_pages(copy, connection))
            if found := stranger(connection):
                problems.append(f"the schema has {found}")
            else:  # else it would compute what the schema asks for
                problems = [words for (words,) in connection.execute("PRAGMA integrity_check") if words != "ok"]
        except sqlite3.DatabaseError as error:
            problems.append(str(error))
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as target:
        migrate(target)
        salvaged = salvage(copy, target)
    words = [line for problem in problems for line in problem.splitlines() if not line.startswith("***")]
    n_pages = copy.stat().st_size // PAGE_BYTES
    return Soundness(n_pages, n_damaged_pages, tuple(words[:_SHOWN]), _tables(salvaged), salvaged.stand_ins)


def _tables(found: Salvaged) -> dict[str, TableSoundness]:
    return {
        name: TableSoundness(rows.n_sound, None if rows.n_rows is None else max(0, rows.n_rows - rows.n_sound))
        for name, rows in found.tables.items()
    }
