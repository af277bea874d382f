"""The rows of a damaged store that can still be read, copied into a new one.

SQLite reads each table by SQL, around the pages that it cannot read. If rows are missing then, SQLite's own program
(`sqlite3 FILE .recover`) adds those on pages that no table leads to any more. Many distributions do not install that
program, or build it without that command: then those rows stay only in the damaged file, which is kept.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from ..schema import guarded, has_table
from .damage import is_io_error, is_passing
from .sound_rows import CELLS, columns_of, sound_condition

_CHUNK_ROWS: Final = 10_000
_LAST_ID: Final = 2**62
_KEYS: Final = {"steps": ("job", "step"), "models": ("name", "fabric_id")}
"""Tables that are read in the order of these columns; all others by `id`."""
_REFERENCES: Final = {
    "fabrics": ("fabric_id", ("jobs.fabric", "series.fabric", "decisions.fabric")),
    "jobs": ("job_id", ("measurements.job", "steps.job", "decisions.job")),
}
"""Tables that others refer to -> the column with a row's name, and the columns that refer to it."""
_TRIES: Final = 3
_PROGRAM: Final = "sqlite3"
_PROGRAM_S: Final = 600.0
_OUTPUT_PER_BYTE: Final = 64
"""Bytes that the program may write for each byte of the file; a hostile file makes it write more."""
_MOST_LINE_BYTES: Final = 64 * 2**20
_INSERT: Final = re.compile(rb"""INSERT (?:OR IGNORE )?INTO ['"]?(\w+)['"]?(?:\([^()]*\))? VALUES ?\(""")
_LOST: Final = re.compile(r'CREATE TABLE "?lost_and_found"?\(rootpgno INTEGER, pgno INTEGER, nfield INTEGER, '
                          r"id INTEGER((?:, c\d{1,2})+)\);\s*")  # fmt: skip
_FUNCTIONS: Final = {"replace", "char", "unistr"}
"""Functions in the program's output for text of several lines."""


Row = tuple[Any, ...]
Of = TypeVar("Of")


class TableRows(NamedTuple):
    """Rows of one table of a damaged store."""

    n_rows: int | None
    """Rows in the damaged store; None: unknown."""
    n_sound: int


class Recovered(NamedTuple):
    """Numbers of recovered and lost rows of a damaged store."""

    tables: dict[str, TableRows]
    stand_ins: int
    """Jobs and fabrics that are lost while other rows refer to them; each is now a row named recovered-ID."""

    @property
    def n_recovered(self) -> int:
        """Measurements in the new store."""
        return self.tables["measurements"].n_sound

    @property
    def n_missing(self) -> int | None:
        """Measurements that are lost; None: how many there were cannot be read."""
        n_rows, n_sound = self.tables["measurements"]
        return None if n_rows is None else max(0, n_rows - n_sound)

    def with_more(self, n_rows: int) -> Recovered:
        """The same with `n_rows` more measurements, which came from another source."""
        there, n_sound = self.tables["measurements"]
        return self._replace(tables=self.tables | {"measurements": TableRows(there, n_sound + n_rows)})


def recover(damaged: Path, target: sqlite3.Connection) -> Recovered:
    """Copy the sound rows of a damaged store.

    Args:
        target: the writer's connection to a new and empty store, in autocommit mode.

    Raises:
        sqlite3.Error: the new store cannot be written, or the damaged one cannot be read at this moment.
    """
    target.execute("BEGIN IMMEDIATE")
    try:
        n_rows, is_whole = _copy_by_sql(damaged, target)
        if not is_whole or n_rows["measurements"] != _count(target, "measurements"):
            _copy_by_program(damaged, target)
        for table in CELLS:
            target.execute(f"DELETE FROM main.{table} WHERE NOT {sound_condition(target, table)}")
        target.execute("DELETE FROM main.measurements WHERE series NOT IN (SELECT id FROM main.series)")
        found = {table: TableRows(n_rows[table], _count(target, table)) for table in CELLS}
        stand_ins = sum(_add_stand_ins(target, table) for table in _REFERENCES)
        n_measurements = found["measurements"].n_sound
        target.execute("UPDATE tallies SET n_rows = ? WHERE name = 'measurements'", (n_measurements,))
        target.execute("COMMIT")
    except BaseException:
        target.execute("ROLLBACK")
        raise
    return Recovered(found, stand_ins)


def _count(connection: sqlite3.Connection, table: str) -> int:
    return int(connection.execute(f"SELECT count(*) FROM main.{table} NOT INDEXED").fetchone()[0])


def _add_stand_ins(target: sqlite3.Connection, table: str) -> int:
    """Add a row for each lost row that others refer to; returns how many."""
    name, references = _REFERENCES[table]
    columns = (reference.split(".") for reference in references)
    referred = " UNION ".join(f"SELECT {column} AS id FROM main.{other}" for other, column in columns)
    return target.execute(
        f"INSERT OR IGNORE INTO main.{table} (id, {name}) SELECT id, 'recovered-' || id FROM ({referred})"
        f" WHERE id > 0 AND id NOT IN (SELECT id FROM main.{table})"
    ).rowcount


# ---- by SQL ---------------------------------------------------------------------------------------------------------


def reading(path: Path) -> sqlite3.Connection:
    """A read-only connection to a file that may be damaged, which makes no side files if there is no log."""
    connection = guarded(sqlite3.connect(_uri(path), uri=True))
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    with contextlib.suppress(sqlite3.DatabaseError):
        connection.execute("PRAGMA writable_schema = ON")  # else SQLite reads nothing of a truncated file
    return connection


def _uri(path: Path) -> str:
    mode = "mode=ro" if path.with_name(path.name + "-wal").exists() else "immutable=1"
    return f"{path.absolute().as_uri()}?{mode}"


def _copy_by_sql(damaged: Path, target: sqlite3.Connection) -> tuple[dict[str, int | None], bool]:
    """Copy what SQLite can read; returns each table's number of rows (None: unknown), and whether all were read."""
    n_rows: dict[str, int | None] = dict.fromkeys(CELLS)
    is_whole = True
    with contextlib.closing(reading(damaged)) as source:

        def columns_there(table: str) -> set[str]:
            return columns_of(source, table) if has_table(source, table) else set()

        def n_written() -> int | None:
            is_there = has_table(source, "tallies")
            found = is_there and source.execute("SELECT n_rows FROM tallies WHERE name = 'measurements'").fetchone()
            return found[0] if found and isinstance(found[0], int) else None

        for table in CELLS:
            there: set[str] = _read(partial(columns_there, table), set())
            columns = sorted(there & columns_of(target, table))
            if columns:
                n_rows[table] = _read(partial(_count, source, table), None)
                rows = _Rows(source, f"SELECT {','.join(columns)} FROM main.{table} NOT INDEXED WHERE 1")
                keys = _KEYS.get(table, ())
                found = rows.from_both_ends(keys) if keys else rows.by_id(columns.index("id"))
                # Damaged pages may lead to others again and again; a row has more than a byte.
                _insert(target, table, columns, itertools.islice(found, damaged.stat().st_size))
                is_whole &= rows.is_whole
            else:
                is_whole = False
        if (n_measurements := _read(n_written, None)) is not None:
            n_rows["measurements"] = max(n_measurements, n_rows["measurements"] or 0)
    return n_rows, is_whole


def _insert(target: sqlite3.Connection, table: str, columns: Sequence[str], rows: Iterable[Row]) -> None:
    marks, waiting = ",".join("?" * len(columns)), iter(rows)
    while chunk := [*itertools.islice(waiting, _CHUNK_ROWS)]:
        target.executemany(f"INSERT OR IGNORE INTO main.{table} ({','.join(columns)}) VALUES ({marks})", chunk)


def _read(read: Callable[[], Of], otherwise: Of) -> Of:
    """The result of a read, or `otherwise` if the file is damaged there; raises if it cannot be read at this moment."""
    for n_failed in range(1, _TRIES + 1):
        try:
            return read()
        except sqlite3.DatabaseError as error:
            if not _may_pass(error, n_failed):
                break
    return otherwise


def _may_pass(error: sqlite3.DatabaseError, n_failed: int) -> bool:
    """Whether to try a failed read again: a lost sector fails again, a disk's other failures may pass.

    Raises the error if it says nothing about the file.
    """
    if is_passing(error):
        raise error
    return is_io_error(error) and n_failed < _TRIES


class _Rows:
    """Rows of one table, as far as they can be read."""

    def __init__(self, source: sqlite3.Connection, select: str) -> None:
        self.is_whole = True
        """Whether all rows so far could be read."""
        self._source = source
        self._select = select

    def from_both_ends(self, keys: Sequence[str]) -> Iterator[Row]:
        """Rows in the order of these columns, from both ends up to the first unreadable row."""
        for order in ("ASC", "DESC"):
            by = ",".join(f"{name} {order}" for name in keys)
            if (yield from self._until_damage(f"{self._select} ORDER BY {by}")):
                break

    def by_id(self, at: int) -> Iterator[Row]:
        """Rows in the order of ids, but backwards from the first readable row behind an unreadable part.

        `at` is the index of the column `id`.
        """
        last, n_failed = 0, 0
        while True:
            try:
                for row in self._source.execute(f"{self._select} AND id > ? ORDER BY id", (last,)):
                    if row[at] > last:  # ids on a damaged page may be in any order
                        last, n_failed = row[at], 0
                    yield row
                return
            except sqlite3.DatabaseError as error:
                n_failed += 1
                if _may_pass(error, n_failed):
                    continue
                self.is_whole = False
            leap = 1
            while leap < _LAST_ID:
                if _read(partial(self._is_readable, last + leap), False):
                    break
                leap *= 2
            else:
                return
            between = f"{self._select} AND id > ? AND id <= ? ORDER BY id DESC"
            yield from self._until_damage(between, last, last + leap)
            last += leap

    def _is_readable(self, after: int) -> bool:
        self._source.execute(f"{self._select} AND id > ? ORDER BY id LIMIT 1", (after,)).fetchone()
        return True

    def _until_damage(self, select: str, *values: int) -> Generator[Row, None, bool]:
        """Rows until one cannot be read; returns whether all could."""
        for n_failed in range(1, _TRIES + 1):
            try:
                yield from self._source.execute(select, values)
                return True
            except sqlite3.DatabaseError as error:
                if not _may_pass(error, n_failed):
                    break
        self.is_whole = False
        return False


# ---- by SQLite's program --------------------------------------------------------------------------------------------


def _copy_by_program(damaged: Path, target: sqlite3.Connection) -> None:
    """Add the rows that `sqlite3 FILE .recover` writes as SQL; none if that program is missing or fails."""
    if (program := shutil.which(_PROGRAM)) is None:
        return
    # Pages that are free hold rows that retention has removed.
    command = [program, _uri(damaged), ".recover --ignore-freelist"]
    n_bytes = _OUTPUT_PER_BYTE * damaged.stat().st_size
    target.set_authorizer(_allow_inserts)
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            timer = threading.Timer(_PROGRAM_S, process.kill)
            timer.start()
            try:
                assert process.stdout is not None
                while n_bytes > 0 and (line := process.stdout.readline(_MOST_LINE_BYTES)):
                    n_bytes -= len(line)
                    _run_line(target, line)
            finally:
                timer.cancel()
                process.kill()
    except OSError:  # it cannot be run
        return
    finally:
        target.set_authorizer(lambda *_: sqlite3.SQLITE_OK)
    _copy_lost_and_found(target)


def _allow_inserts(action: int, first: str | None, second: str | None, *_: object) -> int:
    """Allow inserts into our tables alone: a damaged file may make the program write any SQL."""
    is_insert = action == sqlite3.SQLITE_INSERT and (first in CELLS or first == "lost_and_found")
    is_text = action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS
    return sqlite3.SQLITE_OK if is_insert or is_text else sqlite3.SQLITE_DENY


def _run_line(target: sqlite3.Connection, line: bytes) -> None:
    """Run one line of the program's output if it adds a row; other lines make tables that exist already."""
    text = line.decode(errors="replace")
    if found := _LOST.fullmatch(text):
        target.set_authorizer(lambda *_: sqlite3.SQLITE_OK)
        target.execute(f"CREATE TEMP TABLE IF NOT EXISTS lost_and_found (rootpgno, pgno, nfield, id{found[1]})")
        target.set_authorizer(_allow_inserts)
    elif _INSERT.match(line):
        try:
            target.execute(text)
        except sqlite3.DatabaseError as error:
            if is_passing(error) or is_io_error(error):
                raise
            # A row that does not fit, or an invalid statement, counts as lost.


def _copy_lost_and_found(target: sqlite3.Connection) -> None:
    """Put rows of unknown tables where they belong, by the number of their columns and by what the cells may hold."""
    there = columns_of(target, "lost_and_found", "temp")
    if not there:
        return
    for table in CELLS:
        columns = [name for _, name, *_ in target.execute(f"PRAGMA main.table_info({table})")]
        if f"c{len(columns) - 1}" in there:
            has_id = columns[0] == "id"
            values = ["id" if has_id else "c0", *(f"c{at}" for at in range(1, len(columns)))]
            target.execute(
                f"INSERT OR IGNORE INTO main.{table} ({','.join(columns)}) SELECT {','.join(values)}"
                f" FROM temp.lost_and_found WHERE nfield = ? AND (id IS NULL) = ?",
                (len(columns), table == "steps"),
            )
    target.execute("DROP TABLE temp.lost_and_found")
