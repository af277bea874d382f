"""Sound rows of a damaged store, copied into a new one.

Each table is read by SQLite itself, around what it cannot read; then the measurements on pages that no table leads to
any more are added.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from zerotune.store.sqlite.damage.damage import is_io_error, is_passing
from zerotune.store.sqlite.damage.orphans import orphans
from zerotune.store.sqlite.damage.pages import PAGE_BYTES, read_pages
from zerotune.store.sqlite.damage.replacement import work_prefix
from zerotune.store.sqlite.damage.sound_rows import CELLS, columns_of, sound_condition
from zerotune.store.sqlite.migrations import migrate
from zerotune.store.sqlite.rows import row_checksums
from zerotune.store.sqlite.rows.checksums import COVERED, agree
from zerotune.store.sqlite.rows.measurements import SERIES_COLUMNS
from zerotune.store.sqlite.schema import guarded, has_table

_CHUNK_ROWS: Final = 10_000
_LAST_ID: Final = 2**62
_KEYS: Final = {"steps": ("job", "step"), "models": ("name", "fabric_id")}
"""Tables that are read in the order of these columns; all others by `id`."""
_NAMES: Final = {"jobs": "job_id", "fabrics": "fabric_id"}
"""Tables that others refer to -> the column by which people know a row; an index has it, too."""
_REFERENCES: Final = {
    "jobs": ("measurements.job", "steps.job", "decisions.job"),
    "fabrics": ("jobs.fabric", "series.fabric", "decisions.fabric"),
}
_TRIES: Final = 3
Row = tuple[Any, ...]
Read = TypeVar("Read")


class TableRows(NamedTuple):
    """Rows of one table of a damaged store."""

    n_rows: int | None
    """That there were; None: nobody knows."""
    n_sound: int


class Salvaged(NamedTuple):
    """What became of the rows of a damaged store."""

    n_recovered: int
    """Of measurements."""
    n_missing: int | None
    """Of measurements; None: how many there were cannot be read."""
    tables: dict[str, TableRows]
    """Of every table that may be lost in part."""
    stand_ins: dict[str, int]
    """Rows of jobs and fabrics that others refer to and that are lost: what is known of them is their name at most."""

    def with_more(self, n_rows: int) -> Salvaged:
        """The same with more measurements, which came from elsewhere."""
        missing = None if self.n_missing is None else max(0, self.n_missing - n_rows)
        return self._replace(n_recovered=self.n_recovered + n_rows, n_missing=missing)


def salvage(damaged: Path, connection: sqlite3.Connection) -> Salvaged:
    """Copy what is sound in a damaged store.

    Args:
        damaged: its file, which stays as it is.
        connection: the writer's, to a new and empty store; in autocommit mode.

    Returns:
        How many measurements were found, and how many were not.

    Raises:
        sqlite3.Error: the new store cannot be written.
        OSError: there is no room to work in.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        with tempfile.TemporaryDirectory(prefix=work_prefix(damaged), dir=damaged.parent) as folder:
            rows = _Copy(connection)
            n_written = rows.copy(_readable(damaged, Path(folder)))
            if rows.has_holes or n_written is None or rows.n_measurements < n_written:
                rows.copy_orphans(damaged)
        connection.execute("DELETE FROM main.measurements WHERE series NOT IN (SELECT id FROM main.series)")
        n_recovered = rows.n_measurements
        tables = {table: TableRows(rows.n_found.get(table), rows.n_written(table)) for table in CELLS}
        stand_ins = {table: rows.add_stand_ins(table) for table in _NAMES}
        connection.execute("UPDATE tallies SET n_rows = ? WHERE name = 'measurements'", (n_recovered,))
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    if n_written is not None:
        tables["measurements"] = TableRows(max(n_written, tables["measurements"].n_rows or 0), n_recovered)
    n_missing = None if n_written is None else max(0, n_written - n_recovered)
    return Salvaged(n_recovered, n_missing, tables, stand_ins)


class _Copy:
    """Copies rows into the new store, each once."""

    def __init__(self, target: sqlite3.Connection) -> None:
        self.has_holes = False
        """Whether something could not be read."""
        self.n_found: dict[str, int] = {}
        """Rows of each table whose number can be read."""
        self._target = target
        self._no_tables: set[str] = set()
        """Names that something else than a table bears, such as a view: SQLite would run it."""
        self._lacks_names = False
        """Whether a row that others refer to is left out."""
        self._names: dict[str, list[Row]] = {}
        """By table: ids and names of rows as its index has them."""

    @property
    def n_measurements(self) -> int:
        """How many are there now."""
        return self.n_written("measurements")

    def n_written(self, table: str) -> int:
        """How many rows of a table are there now."""
        return int(self._target.execute(f"SELECT count(*) FROM main.{table}").fetchone()[0])

    def copy(self, path: Path) -> int | None:
        """Copy the sound rows of all tables; returns how many measurements were written, None where that is lost."""
        n_written = None
        with contextlib.closing(_reading(path)) as source:
            with _where_readable():
                n_written = _retried(lambda: self._count_rows(source))
            for table in CELLS:
                self._copy_table(source, table)
            if self.has_holes or self._lacks_names:
                for table, name in _NAMES.items():
                    if table in self._no_tables:
                        continue
                    index = f"SELECT id, {name} FROM main.{table} INDEXED BY sqlite_autoindex_{table}_1"
                    self._names[table] = [*self._until_damage(source, f"{index} WHERE typeof({name}) = 'text'")]
        return n_written

    def add_stand_ins(self, table: str) -> int:
        """Make rows for those that others refer to and that are lost, by their names where an index has them.

        Args:
            table: one of _NAMES.

        Returns:
            How many.
        """
        name = _NAMES[table]
        known: dict[int, str] = dict(self._names.get(table, []))
        referred = " UNION ".join(
            f"SELECT {column} FROM main.{other}"
            for other, _, column in (reference.partition(".") for reference in _REFERENCES[table])
        )
        lost = self._target.execute(
            f"WITH referred(id) AS ({referred})"
            f" SELECT id FROM referred WHERE id > 0 AND id NOT IN (SELECT id FROM main.{table})"
        ).fetchall()
        n_before = self.n_written(table)
        add = f"INSERT OR IGNORE INTO main.{table} (id, {name}) VALUES (?, ?)"
        self._target.executemany(add, [(row, known.get(row, f"recovered-{row}")) for (row,) in lost])
        return self.n_written(table) - n_before

    def copy_orphans(self, path: Path) -> None:
        """Copy measurements from single pages."""
        for found in orphans(path):
            self._insert("measurements", ["id", *COVERED, "checksum"], found)

    def _count_rows(self, source: sqlite3.Connection) -> int | None:
        found = None
        if has_table(source, "tallies"):
            found = source.execute("SELECT n_rows FROM tallies WHERE name = 'measurements'").fetchone()
        return int(found[0]) if found and isinstance(found[0], int) else None

    def _copy_table(self, source: sqlite3.Connection, table: str) -> None:
        there, sound = set[str](), ""
        is_table = True
        with _where_readable():
            is_table = _retried(lambda: has_table(source, table))
        if not is_table:
            self.has_holes = True
            self._no_tables.add(table)
            return
        with _where_readable():
            count = f"SELECT count(*) FROM main.{table} NOT INDEXED"
            (self.n_found[table],) = _retried(lambda: source.execute(count).fetchone())
        with _where_readable():
            there, sound = _retried(lambda: (columns_of(source, table), sound_condition(source, table)))
        columns = sorted(name for name in columns_of(self._target, table) if name in there)
        if not columns:
            self.has_holes = True
            return
        covered = COVERED if table == "measurements" else row_checksums.COVERED.get(table, ())
        if not {*covered}.issubset(columns):
            columns = [name for name in columns if name != "checksum"]  # it would be wrong
        rows = self._rows(source, table, columns, sound)
        while chunk := [*itertools.islice(rows, _CHUNK_ROWS)]:
            self._insert(table, columns, chunk)
        self._lacks_names |= table in _NAMES and self.n_written(table) < self.n_found.get(table, 0)

    def _insert(self, table: str, columns: list[str], rows: list[Row]) -> None:
        if table == "measurements" and "checksum" in columns:
            at = [columns.index(name) for name in (*COVERED, "checksum")]
            good = agree([[row[index] for index in at] for row in rows])
            rows = [rows[index] for index in np.flatnonzero(good)]
        elif table in row_checksums.COVERED and "checksum" in columns:
            at = [columns.index(name) for name in (*row_checksums.COVERED[table], "checksum")]
            rows = [row for row in rows if row_checksums.fits([row[index] for index in at])]
        marks = ",".join("?" * len(columns))
        self._target.executemany(f"INSERT OR IGNORE INTO main.{table} ({','.join(columns)}) VALUES ({marks})", rows)

    def _rows(self, source: sqlite3.Connection, table: str, columns: list[str], sound: str) -> Iterator[Row]:
        listed = ",".join(columns)
        if table not in _KEYS:
            select = f"SELECT {listed} FROM main.{table} NOT INDEXED WHERE {sound}"
            yield from self._by_id(source, select, columns.index("id"))
        keys: tuple[str, ...] = _KEYS.get(table, ())
        index = ""
        if table == "series":  # an index holds all that the table does, but for checksums
            keys, index = SERIES_COLUMNS, "INDEXED BY sqlite_autoindex_series_1"
            listed = listed.replace("checksum", "NULL")
            sound = " AND ".join(f"({CELLS[table][name].format(name)})" for name in SERIES_COLUMNS)
        if keys:
            for order in ("ASC", "DESC"):  # from both ends up to what cannot be read
                by = ",".join(f"{name} {order}" for name in keys)
                select = f"SELECT {listed} FROM main.{table} {index} WHERE {sound} ORDER BY {by}"
                if (yield from self._until_damage(source, select)):
                    break

    def _by_id(self, source: sqlite3.Connection, select: str, at: int) -> Iterator[Row]:
        """All rows that can be read; in the order of ids, but for those between what cannot and the next that can."""
        last, n_failed = 0, 0
        while True:
            try:
                for row in source.execute(f"{select} AND id > ? ORDER BY id", (last,)):
                    last, n_failed = row[at], 0
                    yield row
                return
            except sqlite3.DatabaseError as error:
                n_failed += 1
                if _may_pass(error, n_failed):
                    continue
                self.has_holes = True
            leap = 1
            while leap < _LAST_ID:
                try:
                    source.execute(f"{select} AND id > ? ORDER BY id LIMIT 1", (last + leap,)).fetchone()
                    break
                except sqlite3.DatabaseError as error:
                    _may_pass(error, _TRIES)
                    leap *= 2
            else:
                return
            between = f"{select} AND id > ? AND id <= ? ORDER BY id DESC"
            yield from self._until_damage(source, between, last, last + leap)
            last += leap

    def _until_damage(self, source: sqlite3.Connection, select: str, *values: int) -> Generator[Row, None, bool]:
        """Rows until one cannot be read; whether all could."""
        for n_failed in range(1, _TRIES + 1):
            try:
                yield from source.execute(select, values)
                return True
            except sqlite3.DatabaseError as error:
                if not _may_pass(error, n_failed):
                    break
        self.has_holes = True
        return False


def _may_pass(error: sqlite3.DatabaseError, n_failed: int) -> bool:
    """Whether to read again what has failed so often: a lost sector fails again, another failure of a disk does not.

    Raises:
        sqlite3.DatabaseError: the error, where it says nothing of the file.
    """
    if is_passing(error):
        raise error
    return is_io_error(error) and n_failed < _TRIES


def _retried(read: Callable[[], Read]) -> Read:
    n_failed = 0
    while True:
        try:
            return read()
        except sqlite3.DatabaseError as error:
            n_failed += 1
            if not _may_pass(error, n_failed):
                raise


@contextlib.contextmanager
def _where_readable() -> Iterator[None]:
    """Go on where the file is damaged, not where it only cannot be read now."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if is_passing(error):
            raise


def _uri(path: Path) -> str:
    """To read it without a change, and without side files of its own where it has no log."""
    mode = "mode=ro" if path.with_name(path.name + "-wal").exists() else "immutable=1"
    return f"{path.absolute().as_uri()}?{mode}"


def _reading(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(_uri(path), uri=True)
    guarded(connection)
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    return connection


def _readable(damaged: Path, folder: Path) -> Path:
    """The file itself; if its first page is lost, a copy with that of a new store: tables begin at the same pages."""
    try:
        with contextlib.closing(_reading(damaged)) as source:
            _retried(lambda: source.execute("SELECT count(*) FROM sqlite_master").fetchone())
        return damaged
    except sqlite3.DatabaseError as error:
        if is_passing(error):
            raise
        mended, new = folder / "mended.db", folder / "new.db"
    if not mended.exists():
        with contextlib.closing(sqlite3.connect(new)) as connection:
            migrate(connection)
        page = bytearray(new.read_bytes()[:PAGE_BYTES])
        pages = read_pages(damaged)
        page[28:32] = len(pages).to_bytes(4, "big")
        page[32:40] = bytes(8)  # no free pages
        mended.write_bytes(b"".join([page, *pages[1:]]))
    return mended
