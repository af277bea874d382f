"""Opening a store's file: lock, integrity, version, connection, and refusals."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ..errors import StoreError, StoreLockedError, StoreVersionError, reason
from ..lockfile import LockFile, LockHeld
from ..private_folders import make_private, refuse_open_folder
from .damage.damage import Damage, StoreDamage, check_pages, is_damage, remedy
from .damage.recovery import Recovered, recover
from .damage.replacement import (
    clear,
    declare_whole,
    free_stamp,
    is_set_aside,
    partial_file,
    put_in_place,
    remove,
    unfinished,
)
from .damage.sound_rows import CELLS, columns_of, show_sound_rows, warn_of_damage
from .file_kind import ELSEWHERE, refuse_foreign
from .migrations import APPLICATION_ID, MIGRATIONS_TABLE, READABLE_WITHOUT, all_steps, applied, columns_without, migrate
from .schema import guarded, has_table, stranger

_log = logging.getLogger("zerotune.store")

BUSY_TIMEOUT_S: Final = 10.0
_LITTLE_ROOM_BYTES: Final = 4 * 2**20
_TRIES: Final = 3
_MOST_MODE: Final = 0o640
"""Permissions that a store's file may keep: its group may read it if somebody allowed that."""

Redo = Callable[[sqlite3.Connection], int]
"""Writes recent rows from memory into a new file; returns how many measurements that adds."""


def open_for_writing(path: Path) -> tuple[sqlite3.Connection, LockFile, Damage | None]:
    """The writer's connection, its lock, and the damage of a file that was set aside.

    Raises:
        StoreError: the directory cannot be written, all users may write there, or it or the file is another user's; or
            the file is another application's, has several names, or is damaged and cannot be replaced.
        UntrustedError: a link stands where the lock file goes.
        StoreLockedError: another process has the store open for writing.
        StoreVersionError: a newer zerotune wrote it.
    """
    _refuse_foreign(path)
    lock = _lock(path)
    is_new = False
    try:
        damage = None
        _finish_replacement(path)
        is_new = not path.exists()
        try:
            connection = _checked(path)
        except (sqlite3.DatabaseError, MemoryError) as error:
            if isinstance(error, (sqlite3.OperationalError, MemoryError)):
                raise cannot_be_opened(path, error) from error
            try:
                connection, damage = begin_anew(path, error)
            except (sqlite3.Error, OSError, MemoryError) as failure:
                why = reason(failure)
                problem = f"store {path} is damaged ({reason(error)}), and a new one cannot be begun: {why}"
                raise StoreError(problem, "make room there, or " + ELSEWHERE) from failure
        return connection, lock, damage
    except BaseException:
        if is_new:  # an incomplete store is of no use
            with contextlib.suppress(OSError):
                remove(path)
        lock.release()
        raise


def begin_anew(
    path: Path, error: sqlite3.DatabaseError, redo: Redo | None = None
) -> tuple[sqlite3.Connection, Damage]:
    """Keep a damaged file under another name, and put a new one with its sound rows in its place.

    The caller holds the store's lock, and no connection of this process writes it any more. `redo` writes the caller's
    recent rows into the new file. The result is the writer's connection to the new file, and the damage.

    Raises:
        sqlite3.Error: the new file cannot be written; nothing has changed.
        OSError: the old file cannot be renamed; the next call, or the next opening, tries again.
    """
    connection, kept, found = replace(path, redo)
    if found is None:
        n_recovered, n_missing = int(connection.execute("SELECT count(*) FROM measurements").fetchone()[0]), None
    else:
        n_recovered, n_missing = found.n_recovered, found.n_missing
    damage = Damage(reason(error), kept, n_recovered, n_missing)
    words = "store %s is damaged (%s): kept as %s, going on in a new one; %s"
    _log.error(words, path, damage.error, kept, damage.losses)
    return connection, damage


def replace(path: Path, redo: Redo | None = None) -> tuple[sqlite3.Connection, Path, Recovered | None]:
    """Write a damaged store's sound rows into a new file, and put it in the store's place; see `begin_anew`.

    Returns the writer's connection to the new file, the old file's path, and what was recovered. None is recovered if
    an earlier call has written the new file and could not put it in place.
    """
    found = None
    if (stamp := unfinished(path)) is None:
        stamp = free_stamp(path)
        found = _write_new(path, stamp, redo)
    kept = put_in_place(path, stamp)
    for left in reversed(range(_TRIES)):  # callers would take an error for the known damage
        try:
            return _checked(path), kept, found
        except sqlite3.OperationalError:
            if not left:
                raise
    raise AssertionError


def _write_new(path: Path, stamp: str, redo: Redo | None) -> Recovered:
    partial = partial_file(path, stamp)
    try:
        with contextlib.closing(_checked(partial)) as connection:
            found = recover(path, connection)
            if redo is not None:
                found = found.with_more(redo(connection))
            # Closing would do it, too, but would not report a failure.
            (is_blocked, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if is_blocked:
                raise sqlite3.OperationalError("database is locked")
        declare_whole(path, stamp)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(partial)
        raise
    return found


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A read-only connection; works while another process writes.

    Raises:
        StoreError: there is no file at `path`, it is no store, or it is damaged.
        StoreVersionError: a newer zerotune wrote it.
    """
    _refuse_absent(path)
    try:
        with contextlib.closing(_read_only(path)) as connection:
            connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
            _check_origin(connection, path)
            _check_tables(connection)
            if not all_steps() - {*_applied(connection)} <= {*READABLE_WITHOUT}:
                raise StoreError(
                    f"store {path} was written by an older zerotune",
                    "start `zerotune daemon` once to bring it up",
                )
            warn_of_damage(connection, path, [table for table in CELLS if table != "measurements"])  # may be millions
        return reader(path)
    except StoreDamage as error:
        raise StoreError(f"store {path} is damaged: {reason(error)}", remedy(path)) from error
    except (sqlite3.DatabaseError, MemoryError) as error:
        what_to_do = remedy(path) if is_damage(error) else ELSEWHERE
        raise StoreError(f"store {path} cannot be read: {reason(error)}", what_to_do) from error


def open_unchecked(path: Path) -> sqlite3.Connection:
    """A read-only connection to a store that may be damaged.

    Raises:
        StoreError: there is no store, it is another application's database, or it cannot be read now.
        StoreVersionError: a newer zerotune wrote it.
    """
    _refuse_absent(path)
    _refuse_foreign(path)
    with contextlib.ExitStack() as opened:
        try:
            connection = _read_only(path)
            opened.callback(connection.close)
            _check_origin(connection, path)
        except (sqlite3.OperationalError, MemoryError) as error:
            raise StoreError(f"store {path} cannot be read: {reason(error)}", "try again later") from error
        except sqlite3.DatabaseError:
            pass  # damaged
        opened.pop_all()
    return connection


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a store's lock for a block that no other writer may disturb; raises like `open_for_writing`."""
    lock = _lock(path)
    try:
        _finish_replacement(path)
        yield
    finally:
        lock.release()


def reader(path: Path) -> sqlite3.Connection:
    """A read-only connection to the sound rows; any thread may use it, but only one at a time."""
    connection = _read_only(path)
    show_sound_rows(connection)
    return connection


def _finish_replacement(path: Path) -> None:
    """End an interrupted replacement: put its new file in place if that is complete, else remove it."""
    try:
        clear(path)
        if (stamp := unfinished(path)) is not None:
            kept = put_in_place(path, stamp)
            _log.error("store %s was found damaged before: kept as %s, going on in a new one", path, kept)
    except OSError as error:
        raise StoreError(f"store {path} cannot be mended: {reason(error)}", ELSEWHERE) from error


def _read_only(path: Path) -> sqlite3.Connection:
    # In a directory that cannot be written, SQLite can read a WAL store only as an immutable file,
    # which is safe when no writer has left a log behind.
    settled = not os.access(path.parent, os.W_OK) and not path.with_name(path.name + "-wal").exists()
    mode = "immutable=1" if settled else "mode=ro"
    uri = f"{path.absolute().as_uri()}?{mode}"
    return guarded(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False))


def _lock(path: Path) -> LockFile:
    try:
        make_private(path.parent)
        refuse_open_folder(path, "store", ELSEWHERE)
        return LockFile(path.with_name(path.name + ".lock"))
    except LockHeld as held:
        raise StoreLockedError(
            f"store {path} is in use by `{held.command}` (pid {held.pid})", "stop it, or " + ELSEWHERE
        ) from held
    except OSError as error:
        raise StoreError(f"store directory {path.parent} cannot be written: {error.strerror}", ELSEWHERE) from error


def _own_file(path: Path) -> None:
    """Make an empty private file if there is none; otherwise remove the permissions of users outside its group.

    Raises:
        StoreError: the file cannot be made, is another user's, has several names, or is no file.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        file = path.lstat()  # opening and closing it would drop SQLite's locks on it
    except OSError as error:
        raise StoreError(f"store {path} cannot be opened: {error.strerror}", ELSEWHERE) from error
    if not stat.S_ISREG(file.st_mode):
        raise StoreError(f"store {path} cannot be opened: it is no regular file", ELSEWHERE)
    if file.st_uid != os.getuid():
        raise StoreError(f"store {path} belongs to user {file.st_uid}", f"be that user, or {ELSEWHERE}")
    if file.st_nlink > 1:  # each name has a log of its own, whose rows are missing under the other names
        raise StoreError(
            f"store {path} is one file with {file.st_nlink} names (hard links)",
            f"keep one of them and remove the others, or {ELSEWHERE}",
        )
    if (mode := stat.S_IMODE(file.st_mode)) & ~_MOST_MODE:
        path.chmod(mode & _MOST_MODE)


def _checked(path: Path) -> sqlite3.Connection:
    _own_file(path)
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None)
    try:
        guarded(connection)
        _check_origin(connection, path)
        check_pages(connection)
        _check_tables(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        _refuse_read_only(connection)
        # NORMAL would lose the last transactions in a power cut. Only the writer's thread waits, once for each batch.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        if all_steps() - {*_applied(connection)}:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            migrate(connection)
        warn_of_damage(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _refuse_read_only(connection: sqlite3.Connection) -> None:
    """Refuse a connection that SQLite has silently opened for reading, as it could not open it for writing."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    except sqlite3.OperationalError as error:
        if "readonly" in str(error):
            raise  # another program has locked it; it can be written later
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _check_origin(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse another application's database and a newer zerotune's."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (n_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    is_store = application_id == APPLICATION_ID or has_table(connection, MIGRATIONS_TABLE)
    if is_store and (found := stranger(connection)):
        raise StoreDamage(f"its schema has {found}")
    taken = _applied(connection)
    if n_tables and not taken and application_id != APPLICATION_ID:
        raise StoreError(f"{path} is a database of another application", ELSEWHERE)
    if unknown := [name for name in taken if name not in all_steps()]:
        raise StoreVersionError(
            f"store {path} was written by a newer zerotune (it has schema step {unknown[-1]})",
            "install that version, or " + ELSEWHERE,
        )


def _applied(connection: sqlite3.Connection) -> list[str]:
    there = columns_of(connection, MIGRATIONS_TABLE)
    if there and (lost := {"migration_set", "name"} - there):
        raise StoreDamage(f"column {min(lost)} of table {MIGRATIONS_TABLE} is missing")
    return applied(connection)


def _check_tables(connection: sqlite3.Connection) -> None:
    """Refuse a store that lacks a table or a column of its applied schema steps."""
    pending = all_steps() - {*_applied(connection)}
    if pending == all_steps():  # a new file, unless tables of ours are there
        if tables := [table for table in CELLS if columns_of(connection, table)]:
            raise StoreDamage(f"it has a table {tables[0]}, but none of the schema steps that it took")
        return
    for table, columns in columns_without(pending).items():
        there = columns_of(connection, table)
        if lost := columns - there:
            raise StoreDamage(
                f"column {min(lost)} of table {table} is missing" if there else f"table {table} is missing"
            )


def cannot_be_opened(path: Path, error: sqlite3.Error | MemoryError) -> StoreError:
    """The error for a failure of SQLite other than damage."""
    room = ""
    with contextlib.suppress(OSError):  # SQLite reports a full disk as full, or as "disk I/O error"
        if (free_bytes := shutil.disk_usage(path.parent).free) < _LITTLE_ROOM_BYTES:
            room = f" ({free_bytes:,} bytes are free on its disk)"
    return StoreError(f"store {path} cannot be opened: {reason(error)}{room}", ELSEWHERE)


def _refuse_absent(path: Path) -> None:
    if not path.is_file():
        problem = f"{path} is no regular file" if path.exists() else f"there is no store at {path}"
        raise StoreError(problem, "run a job first, or " + ELSEWHERE)
    if not path.stat().st_size and not path.with_name(path.name + "-wal").exists():
        raise StoreError(f"store {path} is empty", "run a job first, or " + ELSEWHERE)


def _refuse_foreign(path: Path) -> None:
    if not is_set_aside(path):
        refuse_foreign(path)
