"""Units that a cluster engine made of the objects below a URL by the query of `merging.UNITS`, as Parquet files.

They come from whoever builds the book, so a file that is none is a mistake, not skipped. Their numbers are checked as
those of rows are: an engine does not see whether an object's name is the hash of what is in it, nor whose signature it
has, so contributors are what stands in that column.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import duckdb
import pyarrow
import pyarrow.parquet

from zerotune.store.errors import UserError
from zerotune.tuner.fleet.merging import BATCH_ROWS, PLAUSIBLE_SETTING, Merged, Progress
from zerotune.tuner.fleet.objects import COLUMNS, MAX_OBJECT_BYTES, Fabric, NotOurs, fabric_folder, unpack
from zerotune.tuner.fleet.storage import Storage, shown

UNIT: Final = pyarrow.schema(
    [
        *(COLUMNS.field(name) for name in COLUMNS.names[: COLUMNS.names.index("timing_source")]),
        ("block", pyarrow.int64()),
        ("n_calls", pyarrow.int64()),
        ("log_us", pyarrow.float64()),
        ("spread", pyarrow.float64()),
    ]
)
"""What the query gives, whatever widths an engine chose."""
_PLAUSIBLE: Final = (
    f"{PLAUSIBLE_SETTING} AND block BETWEEN 0 AND 33554431 AND n_calls BETWEEN 1 AND 2147483647"
    " AND log_us BETWEEN ln(0.1) AND ln(1e9) AND spread BETWEEN 0 AND 12"
)
_LOOKED_AT: Final = 3
"""Objects of a fabric that are read until one says what the fabric is."""


def take(connection: duckdb.DuckDBPyConnection, units: Storage, objects: Storage, progress: Progress) -> Merged:
    """Put units into an empty state.

    Args:
        connection: of `Merging`.
        units: where they are.
        objects: what they were made of; one of each fabric is read, to say what the fabric is.
        progress: told how it goes; calls count as measurements.

    Returns:
        What was found; its objects are files of units.

    Raises:
        UserError: they cannot be read, or are none.
    """
    where = shown(units.url)
    try:
        paths = [path for path in units.walk("") if path.endswith(".parquet")]
    except Exception as error:  # of any library below fsspec
        raise UserError(f"cannot list {where}: {_words(error)}", "name the folder that the query wrote") from error
    if not paths:
        raise UserError(f"there is no .parquet file below {where}", "name the folder that the query wrote")
    n_rows = 0
    for at, path in enumerate(paths, 1):
        n_calls = 0
        for batch in _batches(units, path):
            n_calls += _insert(connection, batch)
        connection.execute("INSERT INTO objects VALUES (?, ?, ?, '')", [path, path, n_calls])
        n_rows += n_calls
        progress(at, len(paths), n_rows)
    connection.execute("INSERT INTO changed_jobs SELECT DISTINCT fabric_id, contributor, job_id FROM units")
    for (fabric_id,) in connection.execute("SELECT DISTINCT fabric_id FROM units ORDER BY ALL").fetchall():
        facts = json.dumps(dict(_fabric(objects, fabric_id).facts))
        whose = "SELECT DISTINCT fabric_id, contributor, ? FROM units WHERE fabric_id = ?"
        connection.execute(f"INSERT INTO fabrics {whose}", [facts, fabric_id])
    return Merged(len(paths), 0, n_rows, ())


def _batches(units: Storage, path: str) -> Iterator[pyarrow.Table]:
    """A file's units, columns as in `UNIT`."""
    try:
        with units.file(path) as file:
            parquet = pyarrow.parquet.ParquetFile(file)
            if missing := sorted(set(UNIT.names) - set(parquet.schema_arrow.names)):
                raise UserError(
                    f"{path} below {shown(units.url)} has no column {missing[0]}", "run the query of the documentation"
                )
            for batch in parquet.iter_batches(BATCH_ROWS, columns=UNIT.names):
                yield pyarrow.Table.from_batches([batch]).select(UNIT.names).cast(UNIT)
    except UserError:
        raise
    except Exception as error:  # of any library below fsspec, or of pyarrow
        raise UserError(
            f"cannot read {path} below {shown(units.url)}: {_words(error)}", "run the query again, as it is"
        ) from error


def _insert(connection: duckdb.DuckDBPyConnection, batch: pyarrow.Table) -> int:
    """Add units that can be, count the others; calls that were added."""
    connection.register("incoming", batch)
    try:
        connection.execute(f"INSERT INTO units BY NAME SELECT * FROM incoming WHERE {_PLAUSIBLE}")
        connection.execute(
            "INSERT INTO refused SELECT left(coalesce(contributor, ''), 512), count(*) FROM incoming"
            f" WHERE ({_PLAUSIBLE}) IS NOT TRUE GROUP BY 1"
        )
        found = connection.execute(f"SELECT coalesce(sum(n_calls), 0)::BIGINT FROM incoming WHERE {_PLAUSIBLE}")
        (n_calls,) = found.fetchall()[0]
    finally:
        connection.unregister("incoming")
    return int(n_calls)


def _fabric(objects: Storage, fabric_id: str) -> Fabric:
    """What a fabric is, as one of its objects says; without facts where none does."""
    try:
        for path in list(objects.walk(fabric_folder(fabric_id)))[:_LOOKED_AT]:
            try:
                return unpack(path, objects.read(path, MAX_OBJECT_BYTES)).fabric
            except NotOurs:
                continue
    except Exception as error:  # of any library below fsspec
        raise UserError(
            f"cannot read {shown(objects.url)}: {_words(error)}", "name the URL that daemons write to"
        ) from error
    return Fabric(fabric_id, {})


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
