"""Merges a URL's objects to medians by job, setting and block of steps, in a DuckDB file beside the book.

An object is read once, checked, and reduced to *units*: the calls of one setting at one message size, of one job,
within `BLOCK_STEPS` steps. A later build continues from there. Objects are read in batches of `BATCH_ROWS` and DuckDB
spills to disk beyond its limit, so memory does not grow with the number of objects. Each batch is one transaction, so
an interrupted build continues where it ended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Final, NamedTuple

import duckdb
import pyarrow

from ...store.errors import UserError
from ...store.foreign.decoding import Decoding
from ...store.foreign.ways import refuse_reachable
from ...store.private_folders import refuse_open_folder
from .job_lines import LINES
from .objects import MAX_OBJECT_BYTES, VERSION, InvalidObject, Unpacked, decoding, unpack
from .storage import IrregularError, Storage

BATCH_ROWS: Final = 1_000_000
BATCH_OBJECTS: Final = 512
BLOCK_STEPS: Final = 64
"""Steps of one block, which has one median: the network's level may change between blocks."""
READERS: Final = 4
"""Objects that are read concurrently."""
MEMORY_MB: Final = 4096
_BESIDE: Final = (".wal", ".spilled")
"""Suffixes of DuckDB's files beside its database."""
_ELSEWHERE: Final = "write the book into a folder of your own, with another --out"
_LAYOUT: Final = 4

_TABLES: Final = (
    LINES.rstrip()
    + """;
CREATE TABLE meta (layout INTEGER, url VARCHAR, made_at_s BIGINT);
CREATE TABLE objects (name VARCHAR PRIMARY KEY, path VARCHAR, n_rows BIGINT, content VARCHAR);
CREATE TABLE names (contributor VARCHAR PRIMARY KEY, name VARCHAR);
CREATE TABLE not_believed (path VARCHAR PRIMARY KEY, hash VARCHAR, reason VARCHAR);
CREATE TABLE fabrics (fabric_id VARCHAR, contributor VARCHAR, facts VARCHAR, PRIMARY KEY (fabric_id, contributor));
CREATE TABLE refused (contributor VARCHAR, n_rows BIGINT);
CREATE TABLE units (
    contributor VARCHAR, job_id VARCHAR, fabric_id VARCHAR, nccl_version INTEGER, tuner_abi SMALLINT,
    n_ranks INTEGER, n_nodes INTEGER, collective SMALLINT, phase SMALLINT, message_bytes BIGINT,
    algorithm SMALLINT, protocol SMALLINT, n_channels SMALLINT, is_default BOOLEAN,
    block BIGINT, n_calls BIGINT, log_us DOUBLE, spread DOUBLE);
CREATE TABLE changed_jobs (fabric_id VARCHAR, contributor VARCHAR, job_id VARCHAR,
    PRIMARY KEY (fabric_id, contributor, job_id));
"""
)

PLAUSIBLE: Final = (
    "len(contributor) <= 512 AND len(job_id) <= 512 AND len(fabric_id) <= 512 AND nccl_version >= 0 AND tuner_abi >= 0"
    " AND message_bytes BETWEEN 1 AND 4611686018427387904"
    " AND n_ranks BETWEEN 2 AND 1048576 AND n_nodes BETWEEN 1 AND n_ranks"
    " AND collective BETWEEN 0 AND 10 AND phase BETWEEN 0 AND 4"
    " AND algorithm BETWEEN 0 AND 6 AND protocol BETWEEN 0 AND 2 AND n_channels BETWEEN 1 AND 64"
    " AND step BETWEEN 0 AND 2147483647 AND duration_us BETWEEN 0.1 AND 1e9"
)
"""Condition on rows that count. In DuckDB NaN is above all numbers."""

UNITS: Final = f"""
SELECT contributor, job_id, fabric_id, nccl_version, tuner_abi, n_ranks, n_nodes, collective, phase, message_bytes,
       algorithm, protocol, n_channels, is_default, CAST(floor(step / {BLOCK_STEPS}) AS BIGINT) AS block,
       count(*) AS n_calls, median(ln(duration_us)) AS log_us, stddev_pop(ln(duration_us)) AS spread
FROM {{rows}} WHERE {PLAUSIBLE}
GROUP BY contributor, job_id, fabric_id, nccl_version, tuner_abi, n_ranks, n_nodes, collective, phase, message_bytes,
         algorithm, protocol, n_channels, is_default, CAST(floor(step / {BLOCK_STEPS}) AS BIGINT)
"""
"""SQL from rows to units."""

Progress = Callable[[int, int, int], None]
"""Called with numbers of checked objects, of all objects, and of rows merged so far."""


class Merged(NamedTuple):
    """Result of a merge."""

    n_objects: int
    """New objects that were merged."""
    n_known: int
    """Objects that were merged before."""
    n_rows: int
    skipped: tuple[tuple[str, str], ...]
    """Path and reason of each refused object that is new or has changed."""


class Merging:
    """The merged state of a book in a DuckDB file, made if it is missing; use it in a `with` statement.

    Raises:
        UserError: it cannot be used, or others could have made it, and its content would be signed.
    """

    def __init__(self, path: Path, memory_mb: int = MEMORY_MB) -> None:
        path = path.absolute()
        for one in (path, *(path.with_name(path.name + suffix) for suffix in _BESIDE)):
            refuse_reachable(one, "what was merged", _ELSEWHERE)
        refuse_open_folder(path, "what was merged", _ELSEWHERE)
        try:
            # The file's content must not open other files, or load extensions of DuckDB.
            self.connection = duckdb.connect(
                str(path), config={"enable_external_access": "false", "temp_directory": f"{path}{_BESIDE[1]}"}
            )
            self._prepare(memory_mb)
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
        """Merge the new objects below a URL; UserError if the URL cannot be listed."""
        run = self.connection.execute
        known = {name for (name,) in run("SELECT name FROM objects").fetchall()}
        contents = {content for (content,) in run("SELECT content FROM objects WHERE content <> ''").fetchall()}
        refused = {path: (digest, reason) for path, digest, reason in run("FROM not_believed").fetchall()}
        try:
            paths = list(storage.walk(f"v{VERSION}"))
        except Exception as error:  # of any library below fsspec
            raise UserError(f"cannot list {storage.url}: {error}", "name the URL that daemons write to") from error
        # A name is only a claim until its hash was verified, so each file with that name may be the right one.
        new = [path for path in paths if _name(path) not in known]
        run("DELETE FROM not_believed")
        n_rows = n_objects = n_looked_at = 0
        skipped: list[tuple[str, str]] = []
        batch: list[tuple[str, Unpacked]] = []
        for path, digest, found in _read_all(storage, new, refused):
            n_looked_at += 1
            if isinstance(found, InvalidObject):
                path_text = _as_text(path)
                run("INSERT OR REPLACE INTO not_believed VALUES (?, ?, ?)", [path_text, digest, str(found)])
                if path_text not in refused or refused[path_text][0] != digest:
                    skipped.append((path_text, str(found)))
            elif found is None:
                skipped.append((_as_text(path), "it cannot be read now"))
            elif _name(path) not in known:
                known.add(_name(path))
                if found.content in contents:  # signed rows may be copied into other files, and count once
                    found = found._replace(rows=found.rows.slice(0, 0))
                contents |= {found.content} - {""}
                batch.append((path, found))
                n_rows, n_objects = n_rows + found.rows.num_rows, n_objects + 1
            if sum(one.rows.num_rows for _, one in batch) >= BATCH_ROWS or len(batch) >= BATCH_OBJECTS:
                self._take(batch)
                batch = []
                progress(n_looked_at, len(new), n_rows)
        if batch:
            self._take(batch)
        progress(n_looked_at, len(new), n_rows)
        return Merged(n_objects, len(paths) - len(new), n_rows, tuple(skipped))

    def _take(self, batch: list[tuple[str, Unpacked]]) -> None:
        rows, run = pyarrow.concat_tables([one.rows for _, one in batch]), self.connection.execute
        self.connection.register("incoming", rows)
        self.connection.begin()
        try:
            run(f"INSERT INTO units {UNITS.format(rows='incoming')}")
            run(f"INSERT INTO refused SELECT contributor, count(*) FROM incoming WHERE NOT ({PLAUSIBLE}) GROUP BY 1")
            run("INSERT OR IGNORE INTO changed_jobs SELECT DISTINCT fabric_id, contributor, job_id FROM incoming")
            for path, one in batch:
                fabric_id, facts = one.fabric
                run("INSERT INTO objects VALUES (?, ?, ?, ?)", [_name(path), path, one.rows.num_rows, one.content])
                row = [fabric_id, one.contributor, json.dumps(dict(facts))]
                run("INSERT OR IGNORE INTO fabrics VALUES (?, ?, ?)", row)
                run("INSERT OR REPLACE INTO names VALUES (?, ?)", [one.contributor, one.called])
            self.connection.commit()
        except BaseException:
            self.connection.rollback()
            raise
        finally:
            self.connection.unregister("incoming")

    def _prepare(self, memory_mb: int) -> None:
        run = self.connection.execute
        run(f"SET memory_limit = '{int(memory_mb)}MB'")
        run("SET preserve_insertion_order = false")
        run("SET enable_progress_bar = false")
        if not _made_of(self.connection):
            self.connection.execute(_TABLES)
            run("INSERT INTO meta VALUES (?, '', 0)", [_LAYOUT])
        with duckdb.connect(":memory:") as expected:
            expected.execute(_TABLES)
            has_layout = _made_of(self.connection) == _made_of(expected)
        if not has_layout or run("SELECT layout FROM meta").fetchall() != [(_LAYOUT,)]:
            raise OSError("another version of zerotune, or another program, made it")


def _made_of(connection: duckdb.DuckDBPyConnection) -> list[tuple[str, str]]:
    """Every table, view and macro of a file that is not DuckDB's own, with its SQL."""
    found = connection.execute(
        "SELECT table_name, sql FROM duckdb_tables() UNION ALL SELECT view_name, sql FROM duckdb_views()"
        " WHERE NOT internal UNION ALL SELECT index_name, sql FROM duckdb_indexes() UNION ALL"
        " SELECT function_name, macro_definition FROM duckdb_functions() WHERE NOT internal ORDER BY ALL"
    )
    return found.fetchall()


def _name(path: str) -> str:
    """The hash of its content that an object's name states."""
    return path.rpartition("/")[2]


def _as_text(path: str) -> str:
    """A path as text; bytes that are not UTF-8 become escapes."""
    return path.encode(errors="backslashreplace").decode()


Found = Unpacked | InvalidObject | None


def _read_all(
    storage: Storage, paths: list[str], refused: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, str, Found]]:
    """Every object in turn with its content's hash, read ahead; None for one that cannot be read now."""
    decoders: SimpleQueue[Decoding] = SimpleQueue()

    def read(path: str) -> tuple[str, Found]:
        try:
            data = storage.read(path, MAX_OBJECT_BYTES)
        except IrregularError as error:
            return "", InvalidObject(str(error))
        except Exception:  # of any library below fsspec
            return "", None
        if len(data) > MAX_OBJECT_BYTES:
            return "", InvalidObject("it is too large")
        digest = hashlib.sha256(data).hexdigest()
        known, reason = refused.get(_as_text(path), ("", ""))
        if known == digest:
            return digest, InvalidObject(reason)
        decode = decoders.get()
        try:
            return digest, unpack(path, data, decode)
        except InvalidObject as error:
            return digest, error
        finally:
            decoders.put(decode)

    with ExitStack() as stack, ThreadPoolExecutor(READERS) as pool:
        for _ in range(READERS):
            decoders.put(stack.enter_context(decoding()))
        remaining = iter(paths)
        ahead: list[tuple[str, Future[tuple[str, Found]]]] = [
            (path, pool.submit(read, path)) for path in islice(remaining, 2 * READERS)
        ]
        while ahead:
            path, future = ahead.pop(0)
            yield path, *future.result()
            for following in islice(remaining, 1):
                ahead.append((following, pool.submit(read, following)))
