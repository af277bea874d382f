"""What is merged of a URL's objects: medians by job, setting and stretch of steps, in a DuckDB file beside the book.

An object is read once, checked, and reduced to *units*: the calls of one setting at one message size, of one job,
within `BLOCK_STEPS` steps. A later build goes on from there. Objects are read in batches of `BATCH_ROWS` and DuckDB
spills to disk beyond its limit, so memory does not grow with what lies below the URL; each batch is one transaction, so
a build that is interrupted goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

import duckdb
import pyarrow

from zerotune.store.errors import UserError
from zerotune.tuner.fleet.objects import MAX_OBJECT_BYTES, VERSION, Fabric, NotOurs, unpack
from zerotune.tuner.fleet.storage import Storage

BATCH_ROWS: Final = 1_000_000
BATCH_OBJECTS: Final = 512
BLOCK_STEPS: Final = 64
"""Medians are taken of so many steps: the level of the network may change from one to the next."""
READERS: Final = 4
"""Objects that are read at a time."""
MEMORY_MB: Final = 4096
_LAYOUT: Final = 1

_TABLES: Final = """
CREATE TABLE meta (layout INTEGER, url VARCHAR);
CREATE TABLE objects (name VARCHAR PRIMARY KEY, path VARCHAR, n_rows BIGINT, reason VARCHAR);
CREATE TABLE fabrics (fabric_id VARCHAR PRIMARY KEY, facts VARCHAR);
CREATE TABLE refused (contributor VARCHAR, n_rows BIGINT);
CREATE TABLE units (
    contributor VARCHAR, job_id VARCHAR, fabric_id VARCHAR, nccl_version INTEGER, tuner_abi SMALLINT,
    n_ranks INTEGER, n_nodes INTEGER, collective SMALLINT, phase SMALLINT, message_bytes BIGINT,
    algorithm SMALLINT, protocol SMALLINT, n_channels SMALLINT, is_default BOOLEAN,
    block BIGINT, n_calls BIGINT, log_us DOUBLE, spread DOUBLE);
CREATE TABLE changed_jobs (fabric_id VARCHAR, contributor VARCHAR, job_id VARCHAR,
    PRIMARY KEY (fabric_id, contributor, job_id));
"""

PLAUSIBLE_SETTING: Final = (
    "len(contributor) <= 512 AND len(job_id) <= 512 AND len(fabric_id) <= 512 AND nccl_version >= 0 AND tuner_abi >= 0"
    " AND message_bytes BETWEEN 1 AND 4611686018427387904"
    " AND n_ranks BETWEEN 2 AND 1048576 AND n_nodes BETWEEN 1 AND n_ranks"
    " AND collective BETWEEN 0 AND 10 AND phase BETWEEN 0 AND 4"
    " AND algorithm BETWEEN 0 AND 6 AND protocol BETWEEN 0 AND 2 AND n_channels BETWEEN 1 AND 64"
)
PLAUSIBLE: Final = f"{PLAUSIBLE_SETTING} AND step BETWEEN 0 AND 2147483647 AND duration_us BETWEEN 0.1 AND 1e9"
"""What a row must be to count. NaN is above all numbers in DuckDB and Spark."""

UNITS: Final = f"""
SELECT contributor, job_id, fabric_id, nccl_version, tuner_abi, n_ranks, n_nodes, collective, phase, message_bytes,
       algorithm, protocol, n_channels, is_default, CAST(floor(step / {BLOCK_STEPS}) AS BIGINT) AS block,
       count(*) AS n_calls, median(ln(duration_us)) AS log_us, stddev_pop(ln(duration_us)) AS spread
FROM {{rows}} WHERE {PLAUSIBLE}
GROUP BY contributor, job_id, fabric_id, nccl_version, tuner_abi, n_ranks, n_nodes, collective, phase, message_bytes,
         algorithm, protocol, n_channels, is_default, CAST(floor(step / {BLOCK_STEPS}) AS BIGINT)
"""
"""Rows to units; DuckDB and Spark take it alike."""

Progress = Callable[[int, int, int], None]
"""Called with objects looked at, objects there are, and rows merged so far."""


class Merged(NamedTuple):
    """What a merge found."""

    n_objects: int
    """New ones that were merged."""
    n_known: int
    """Merged before."""
    n_rows: int
    skipped: tuple[tuple[str, str], ...]
    """Path and reason of each new one that is not believed."""


class Merging:
    """The state of a book's making; use it in a `with` statement.

    Args:
        path: the DuckDB file; made if need be.
        memory_mb: that DuckDB may take.

    Raises:
        UserError: it cannot be used.
    """

    def __init__(self, path: Path, memory_mb: int = MEMORY_MB) -> None:
        try:
            self.connection = duckdb.connect(str(path))
            self._prepare(path, memory_mb)
        except (duckdb.Error, OSError) as error:
            words = " ".join(str(error).split())[:200]
            what_to_do = "remove it to merge everything anew" if path.exists() else "write the book to another --out"
            raise UserError(f"cannot use {path}: {words}", what_to_do) from error

    def __enter__(self) -> Merging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()

    def merge(self, storage: Storage, progress: Progress = lambda looked_at, there_are, n_rows: None) -> Merged:
        """Take in what lies below a URL and was not merged yet.

        Args:
            storage: the URL.
            progress: told how it goes.

        Returns:
            What was found.

        Raises:
            UserError: the URL cannot be listed.
        """
        known = {name for (name,) in self.connection.execute("SELECT name FROM objects").fetchall()}
        try:
            paths = list(storage.walk(f"v{VERSION}"))
        except Exception as error:  # of any library below fsspec
            raise UserError(f"cannot list {storage.url}: {error}", "name the URL that daemons write to") from error
        new = {_name(path): path for path in paths if _name(path) not in known}
        n_rows = n_objects = n_looked_at = 0
        skipped: list[tuple[str, str]] = []
        batch: list[tuple[str, pyarrow.Table, Fabric]] = []
        for path, found in _read_all(storage, list(new.values())):
            n_looked_at += 1
            if isinstance(found, NotOurs):
                skipped.append((path, str(found)))
                self.connection.execute("INSERT INTO objects VALUES (?, ?, 0, ?)", [_name(path), path, str(found)])
            elif found is not None:
                batch.append((path, *found))
                n_rows, n_objects = n_rows + found[0].num_rows, n_objects + 1
            else:
                skipped.append((path, "it cannot be read now"))
            if sum(table.num_rows for _, table, _ in batch) >= BATCH_ROWS or len(batch) >= BATCH_OBJECTS:
                self._take(batch)
                batch = []
                progress(n_looked_at, len(new), n_rows)
        if batch:
            self._take(batch)
        progress(n_looked_at, len(new), n_rows)
        return Merged(n_objects, len(paths) - len(new), n_rows, tuple(skipped))

    def _take(self, batch: list[tuple[str, pyarrow.Table, Fabric]]) -> None:
        rows, run = pyarrow.concat_tables([table for _, table, _ in batch]), self.connection.execute
        self.connection.register("incoming", rows)
        self.connection.begin()
        try:
            run(f"INSERT INTO units {UNITS.format(rows='incoming')}")
            run(f"INSERT INTO refused SELECT contributor, count(*) FROM incoming WHERE NOT ({PLAUSIBLE}) GROUP BY 1")
            run("INSERT OR IGNORE INTO changed_jobs SELECT DISTINCT fabric_id, contributor, job_id FROM incoming")
            for path, table, fabric in batch:
                run("INSERT INTO objects VALUES (?, ?, ?, '')", [_name(path), path, table.num_rows])
                run("INSERT OR IGNORE INTO fabrics VALUES (?, ?)", [fabric.fabric_id, json.dumps(dict(fabric.facts))])
            self.connection.commit()
        except BaseException:
            self.connection.rollback()
            raise
        finally:
            self.connection.unregister("incoming")

    def _prepare(self, path: Path, memory_mb: int) -> None:
        run = self.connection.execute
        run(f"SET memory_limit = '{int(memory_mb)}MB'")
        run(f"SET temp_directory = '{str(path).replace(chr(39), chr(39) * 2)}.spilled'")
        run("SET preserve_insertion_order = false")
        run("SET enable_progress_bar = false")
        tables = {name for (name,) in run("SELECT table_name FROM duckdb_tables()").fetchall()}
        if not tables:
            self.connection.execute(_TABLES)
            run("INSERT INTO meta VALUES (?, '')", [_LAYOUT])
        elif "meta" not in tables or run("SELECT layout FROM meta").fetchall() != [(_LAYOUT,)]:
            raise OSError("another version of zerotune, or another program, made it")


def _name(path: str) -> str:
    """What an object is called; the same in another folder is the same."""
    return path.rpartition("/")[2]


Found = tuple[pyarrow.Table, Fabric] | NotOurs | None


def _read_all(storage: Storage, paths: list[str]) -> Iterator[tuple[str, Found]]:
    """Every object in turn, some read ahead; None for one that cannot be read now."""

    def read(path: str) -> Found:
        try:
            data = storage.read(path, MAX_OBJECT_BYTES)
        except Exception:  # of any library below fsspec
            return None
        if len(data) > MAX_OBJECT_BYTES:
            return NotOurs("it is too large")
        try:
            return unpack(path, data)
        except NotOurs as error:
            return error

    with ThreadPoolExecutor(READERS) as pool:
        remaining = iter(paths)
        ahead: list[tuple[str, Future[Found]]] = [
            (path, pool.submit(read, path)) for path in islice(remaining, 2 * READERS)
        ]
        while ahead:
            path, future = ahead.pop(0)
            yield path, future.result()
            for following in islice(remaining, 1):
                ahead.append((following, pool.submit(read, following)))
