"""Opening a store's file: lock, integrity, version, connection; and what may be refused."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import sqlite3
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from zerotune.store.errors import StoreError, StoreLockedError, StoreVersionError, reason
from zerotune.store.lockfile import LockFile, LockHeld
from zerotune.store.private_folders import make_private, refuse_open_folder
from zerotune.store.sqlite.damage.damage import Damage, check_pages, is_damage, remedy
from zerotune.store.sqlite.damage.replacement import (
    clear,
    declare_whole,
    free_stamp,
    is_set_aside,
    partial_file,
    put_in_place,
    remove,
    unfinished,
)
from zerotune.store.sqlite.damage.salvage import Salvaged, salvage
from zerotune.store.sqlite.damage.sound_rows import CELLS, columns_of, show_sound_rows, sound_condition, warn_of_damage
from zerotune.store.sqlite.migrations import (
    APPLICATION_ID,
    MIGRATIONS_TABLE,
    READABLE_WITHOUT,
    all_steps,
    applied,
    columns_without,
    migrate,
)
from zerotune.store.sqlite.rows.checksums import mark_wrong_rows
from zerotune.store.sqlite.rows.row_checksums import COVERED, mark_wrong_records, seal_the_rest
from zerotune.store.sqlite.schema import guarded, has_table, stranger

_log = logging.getLogger("zerotune.store")

BUSY_TIMEOUT_S: Final = 10.0
_ELSEWHERE: Final = "name another store, in the command or with ZEROTUNE_STORE"
_LITTLE_ROOM_BYTES: Final = 4 * 2**20
_TRIES: Final = 3
_SQLITE_HEADER: Final = b"SQLite format 3\0"
_DATABASE_SUFFIXES: Final = (".db", ".sqlite", ".sqlite3")
_MOST_MODE: Final = 0o640
"""Of a store's file: its group may read it where somebody allowed that."""
_ON_THE_FILE: Final = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 2**62, 1, 0)
"""struct flock: one byte, far behind those that SQLite locks and behind any that a file has."""


Redo = Callable[[sqlite3.Connection], int]


class StoreDamage(sqlite3.DatabaseError):
    """SQLite can read the file, but tables or columns are missing."""


class WriterLock:
    """Held by the one process that writes a store, from construction to `release`.

    The lock file beside the store says who that is. What counts is the lock on the file itself, which may have been
    renamed, or be mounted elsewhere. It belongs to its open file: SQLite's own, of the process, do not mind it.

    Raises:
        StoreError: anyone may write to the store's directory, or nobody, or it is another user's.
        StoreLockedError: another process holds it.
        UntrustedError: a link stands where the lock file goes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._beside = _lock(path)

    def take_file(self, path: Path | None = None) -> None:
        """Lock the file that has the store's name now, an empty one of this user alone where there was none.

        Args:
            path: of a file that is going to have that name, instead.

        Raises:
            StoreError: it cannot be opened, is another user's, or has other names by hard links.
            StoreLockedError: another process has it open for writing, under another name.
        """
        self._let_go()
        path = path or self._path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"store {path} cannot be opened: {error.strerror}", _ELSEWHERE) from error
        _refuse_others_file(path, self._descriptor)
        if (n_names := os.fstat(self._descriptor).st_nlink) > 1:
            raise StoreError(  # SQLite's log goes by the name: under each, the file lacks what the others' logs hold
                f"store {path} is one file with {n_names} names (hard links)",
                f"keep one of them and remove the others, or {_ELSEWHERE}",
            )
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _ON_THE_FILE)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise StoreLockedError(
                    f"store {path} is in use under another name", f"stop the daemon that has it, or {_ELSEWHERE}"
                ) from error
            # A kernel or a file system without such locks: the one beside the store has to do.

    def release(self) -> None:
        """Free the store for others, after all connections to it were closed; may be called twice."""
        self._let_go()
        self._beside.release()

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_for_writing(path: Path, *, may_set_aside: bool = True) -> tuple[sqlite3.Connection, WriterLock, Damage | None]:
    """The writer's connection, the lock that goes with it, and what was wrong with a file that was set aside.

    Args:
        path: of the file itself: no symbolic link.
        may_set_aside: move a damaged file to another name.

    Raises:
        StoreError: the directory cannot be written, or anyone may write there; or it or the file is another user's; or
            the file is another application's, or has several names, or is corrupt and may not be set aside.
        UntrustedError: a link stands where the lock file goes.
        StoreLockedError: another process has the store open for writing.
        StoreVersionError: a newer zerotune wrote it.
    """
    _refuse_foreign(path)
    lock = WriterLock(path)
    is_new = False
    try:
        damage = None
        _end_what_was_begun(path)
        is_new = not path.exists()
        lock.take_file()
        try:
            connection = _checked(path)
        except (sqlite3.DatabaseError, MemoryError) as error:
            if isinstance(error, (sqlite3.OperationalError, MemoryError)):
                raise cannot_be_opened(path, error) from error
            if not may_set_aside:
                raise StoreError(f"store {path} is damaged: {reason(error)}", remedy(path)) from error
            try:
                connection, damage = begin_anew(path, error, lock)
            except (sqlite3.Error, OSError, MemoryError) as failure:
                why = reason(failure)
                problem = f"store {path} is damaged ({reason(error)}), and a new one cannot be begun: {why}"
                raise StoreError(problem, "make room there, or " + _ELSEWHERE) from failure
        return connection, lock, damage
    except BaseException:
        if is_new:  # on a full disk, for example: half a store is of no use
            with contextlib.suppress(OSError):
                remove(path)
        lock.release()
        raise


def begin_anew(
    path: Path, error: sqlite3.DatabaseError, lock: WriterLock, redo: Redo | None = None
) -> tuple[sqlite3.Connection, Damage]:
    """Keep a damaged file under another name, and begin a new one in its place with what is sound of it.

    Args:
        path: of the store, which no connection of this process writes any more.
        error: what SQLite found.
        lock: of the store, which is held; it is the new file's from now on.
        redo: writes into the new file what the caller still knows, and returns by how many measurements there are
            more then.

    Returns:
        The writer's connection to the new file, and what is known of the damage.

    Raises:
        StoreError: the new file cannot be locked; all is as it was.
        sqlite3.Error: the new file cannot be written; all is as it was.
        OSError: the old one cannot be renamed; that is tried again by the next call, or opening.
    """
    found = None
    if (stamp := unfinished(path)) is None:
        stamp = free_stamp(path)
        found = write_sound_rows(path, stamp, lock, redo)
    connection, kept = replace(path, stamp, lock)
    if found is None:
        found = Salvaged(int(connection.execute("SELECT count(*) FROM measurements").fetchone()[0]), None, {}, {})
    damage = Damage(reason(error), kept, found.n_recovered, found.n_missing)
    words = "store %s is damaged (%s): kept as %s, going on in a new one; %s"
    _log.error(words, path, damage.error, kept, damage.losses)
    return connection, damage


def write_sound_rows(path: Path, stamp: str, lock: WriterLock, redo: Redo | None = None) -> Salvaged:
    """Write what is sound of a damaged store into a new file beside it, and declare that whole.

    Args:
        path: of the store, which no connection of this process writes any more.
        stamp: of the new file, which must be free.
        lock: of the store, which is held; it is the new file's from now on.
        redo: as of `begin_anew`.

    Returns:
        What was found.

    Raises:
        StoreError: the new file cannot be locked; all is as it was.
        sqlite3.Error: the new file cannot be written; all is as it was.
        OSError: so is that.
    """
    partial = partial_file(path, stamp)
    try:
        lock.take_file(partial)
        with contextlib.closing(_checked(partial)) as connection:
            found = salvage(path, connection)
            if redo is not None:
                found = found.with_more(redo(connection))
            # Closing would do it, too, and keep to itself that it failed.
            (is_blocked, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if is_blocked:
                raise sqlite3.OperationalError("database is locked")
        declare_whole(path, stamp)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(partial)
        lock.take_file()
        raise
    return found


def replace(path: Path, stamp: str, lock: WriterLock) -> tuple[sqlite3.Connection, Path]:
    """Put a new file that is whole into the store's place.

    Args:
        path: of the store, which no connection of this process writes any more.
        stamp: of the new file.
        lock: of the store, which is held; it is the new file's from now on.

    Returns:
        The writer's connection to the new file, and where the old one is.

    Raises:
        sqlite3.Error: it cannot be opened.
        OSError: something cannot be renamed now; that is tried again by the next opening.
    """
    kept = put_in_place(path, stamp)
    lock.take_file()
    for left in reversed(range(_TRIES)):  # the caller would take it for the damaged one that it knows of
        try:
            return _checked(path), kept
        except sqlite3.OperationalError:
            if not left:
                raise
    raise AssertionError


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A read-only connection; works while another process writes.

    Raises:
        StoreError: there is no store at `path`, or it is not one, or it is corrupt.
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
        what_to_do = remedy(path) if is_damage(error) else _ELSEWHERE
        raise StoreError(f"store {path} cannot be read: {reason(error)}", what_to_do) from error


def open_unchecked(path: Path) -> sqlite3.Connection:
    """A read-only connection to a store that may be damaged.

    Raises:
        StoreError: there is none, or another application's database, or nobody can read it now.
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
def held(path: Path) -> Iterator[WriterLock]:
    """The lock of a store, for a block that no other writer may disturb.

    Raises:
        StoreError: the directory cannot be written, or anyone may write there, or it or the file is another user's, or
            the file has several names.
        UntrustedError: a link stands where the lock file goes.
        StoreLockedError: another process has the store open for writing.
    """
    lock = WriterLock(path)
    try:
        _end_what_was_begun(path)
        lock.take_file()
        yield lock
    finally:
        lock.release()


def reader(path: Path) -> sqlite3.Connection:
    """A read-only connection that any one thread may use, to the rows that are sound."""
    connection = _read_only(path)
    show_sound_rows(connection)
    return connection


def _end_what_was_begun(path: Path) -> None:
    """A replacement that was cut off: its new file is put in place if it is whole, else removed."""
    try:
        clear(path)
        if (stamp := unfinished(path)) is not None:
            kept = put_in_place(path, stamp)
            _log.error("store %s was found damaged before: kept as %s, going on in a new one", path, kept)
    except OSError as error:
        raise StoreError(f"store {path} cannot be mended: {reason(error)}", _ELSEWHERE) from error


def _read_only(path: Path) -> sqlite3.Connection:
    # In a directory that cannot be written SQLite can read a WAL store only as an immutable file,
    # which is safe when no writer has left a log behind.
    settled = not os.access(path.parent, os.W_OK) and not path.with_name(path.name + "-wal").exists()
    mode = "immutable=1" if settled else "mode=ro"
    uri = f"{path.absolute().as_uri()}?{mode}"
    return guarded(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False))


def _lock(path: Path) -> LockFile:
    try:
        make_private(path.parent)
        refuse_open_folder(path, "store", _ELSEWHERE)
        return LockFile(path.with_name(path.name + ".lock"))
    except LockHeld as held:
        raise StoreLockedError(
            f"store {path} is in use by `{held.command}` (pid {held.pid})", "stop it, or " + _ELSEWHERE
        ) from held
    except OSError as error:
        raise StoreError(f"store directory {path.parent} cannot be written: {error.strerror}", _ELSEWHERE) from error


def _refuse_others_file(path: Path, descriptor: int) -> None:
    """Raise StoreError where it is another user's; close it to those who are not of its group."""
    file = os.fstat(descriptor)
    if file.st_uid != os.getuid():
        raise StoreError(f"store {path} belongs to user {file.st_uid}", f"be that user, or {_ELSEWHERE}")
    mode = stat.S_IMODE(file.st_mode)
    if mode & ~_MOST_MODE:
        os.fchmod(descriptor, mode & _MOST_MODE)


def _checked(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None)
    try:
        guarded(connection)
        _check_origin(connection, path)
        check_pages(connection)
        _check_tables(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        _refuse_read_only(connection)
        # NORMAL would lose the last transactions in a power cut. It is the writer's thread that waits, for each batch.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        if all_steps() - {*_applied(connection)}:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            migrate(connection)
        mark_wrong_rows(connection, sound_condition(connection, "measurements"))
        for table in COVERED:
            mark_wrong_records(connection, table, sound_condition(connection, table))
        seal_the_rest(connection)
        warn_of_damage(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _refuse_read_only(connection: sqlite3.Connection) -> None:
    """SQLite opens for reading what it cannot open for writing at that moment, and keeps to that without a word."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    except sqlite3.OperationalError as error:
        if "readonly" in str(error):
            raise  # locked by another program, it is written later
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _check_origin(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse another application's database and a newer zerotune's."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (n_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    is_ours = application_id == APPLICATION_ID or has_table(connection, MIGRATIONS_TABLE)
    if is_ours and (found := stranger(connection)):
        raise StoreDamage(f"its schema has {found}")
    taken = _applied(connection)
    if n_tables and not taken and application_id != APPLICATION_ID:
        raise StoreError(f"{path} is a database of another application", _ELSEWHERE)
    if unknown := [name for name in taken if name not in all_steps()]:
        raise StoreVersionError(
            f"store {path} was written by a newer zerotune (it has schema step {unknown[-1]})",
            "install that version, or " + _ELSEWHERE,
        )


def _applied(connection: sqlite3.Connection) -> list[str]:
    there = columns_of(connection, MIGRATIONS_TABLE)
    if there and (lost := {"migration_set", "name"} - there):
        raise StoreDamage(f"column {min(lost)} of table {MIGRATIONS_TABLE} is missing")
    return applied(connection)


def _check_tables(connection: sqlite3.Connection) -> None:
    """Refuse a store that lacks a table or a column that the schema steps it took have made."""
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
    """What is said where SQLite fails for another reason than damage."""
    room = ""
    with contextlib.suppress(OSError):  # SQLite says of a full disk that it is full, or "disk I/O error"
        if (free_bytes := shutil.disk_usage(path.parent).free) < _LITTLE_ROOM_BYTES:
            room = f" ({free_bytes:,} bytes are free on its disk)"
    return StoreError(f"store {path} cannot be opened: {reason(error)}{room}", _ELSEWHERE)


def _refuse_absent(path: Path) -> None:
    if not path.is_file():
        raise StoreError(f"there is no store at {path}", "run a job first, or " + _ELSEWHERE)
    if not path.stat().st_size and not path.with_name(path.name + "-wal").exists():
        raise StoreError(f"store {path} is empty", "run a job first, or " + _ELSEWHERE)


def _refuse_foreign(path: Path) -> None:
    """Refuse a mistyped path: a file that is no database, by its first bytes and by its name."""
    if path.is_file() and path.suffix not in _DATABASE_SUFFIXES and not is_set_aside(path):
        with path.open("rb") as file:
            begin = file.read(len(_SQLITE_HEADER))
        if begin and begin != _SQLITE_HEADER:
            raise StoreError(f"{path} is no zerotune store", _ELSEWHERE)
