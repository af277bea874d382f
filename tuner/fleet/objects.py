"""Measurements as Parquet objects: what is in one, what it is called, and what is believed of one that is found.

An object holds rows of one fabric by one contributor, and is called by the SHA-256 of its bytes:

    v1/fabric=FABRIC_ID/day=YYYY-MM-DD/SHA256.parquet

`fabric` and `day` are partitions as Hive, DuckDB and Spark know them (percent-encoded where need be). Nothing is ever
written over: other columns would be another version beside this one.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import json
import math
import re
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Final, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.ipc
import pyarrow.parquet
from numpy.typing import NDArray

from zerotune.agent.nccl.release import Release
from zerotune.store.foreign.decoding import Decoding, Undecodable

VERSION: Final = 1
MAX_OBJECT_BYTES: Final = 64 * 2**20
MAX_OBJECT_ROWS: Final = 1_000_000
"""A daemon writes no more than half of it at a time."""
MAX_UNPACKED_BYTES: Final = 128 * 2**20
"""Of all texts of one object, in full; more is a bomb."""
MEMORY_MIB: Final = 768
DECODE_S: Final = 60.0
MAX_TEXT: Final = 512
"""Characters of an id, and of a contributor's name."""
MAX_FACTS: Final = 256
MAX_FACT_TEXT: Final = 4096
"""Characters of one fact of a fabric: books hold them."""
MAX_FACTS_BYTES: Final = 2**20
"""Of all of them, as JSON."""
_MARK: Final = b"zerotune.fleet"
_FACTS: Final = b"zerotune.fabric"

COLUMNS: Final = pyarrow.schema(
    [
        ("contributor", pyarrow.string()),
        ("job_id", pyarrow.string()),
        ("fabric_id", pyarrow.string()),
        ("nccl_version", pyarrow.int32()),
        ("tuner_abi", pyarrow.int16()),
        ("n_ranks", pyarrow.int32()),
        ("n_nodes", pyarrow.int32()),
        ("collective", pyarrow.int16()),
        ("phase", pyarrow.int16()),
        ("message_bytes", pyarrow.int64()),
        ("algorithm", pyarrow.int16()),
        ("protocol", pyarrow.int16()),
        ("n_channels", pyarrow.int16()),
        ("is_default", pyarrow.bool_()),
        ("timing_source", pyarrow.int16()),
        ("epoch", pyarrow.int64()),
        ("step", pyarrow.int64()),
        ("duration_us", pyarrow.float64()),
        ("measured_at_s", pyarrow.int64()),
    ]
)
"""Signed integers, floats and text only, which every engine reads; numbers as in `zerotune.store.records`."""
_TEXTS: Final = ("contributor", "job_id", "fabric_id")
_OF_BLOCK: Final = (
    "n_ranks", "n_nodes", "collective", "phase", "message_bytes", "algorithm", "protocol", "n_channels", "is_default",
    "timing_source", "epoch", "step", "duration_us",
)  # fmt: skip
_SORTED_BY: Final = (
    "step", "n_channels", "protocol", "algorithm", "is_default", "message_bytes", "phase", "collective", "n_ranks",
)  # fmt: skip
"""For `lexsort`: the last counts first. Equal values side by side take next to no room."""
_NAME: Final = re.compile(r"([0-9a-f]{64})\.parquet")


class Fabric(NamedTuple):
    """Where something was measured."""

    fabric_id: str
    facts: Mapping[str, str | int | float | bool]
    """The description that ranks give of it; `nccl_version` as NCCL encodes it."""


class Packed(NamedTuple):
    """An object: its path below the URL, and its bytes."""

    path: str
    data: bytes


class NotOurs(ValueError):
    """An object that is not believed; the text says why."""


def pack(
    contributor: str, fabric: Fabric, job_ids: list[str], job: NDArray[np.int64], block: NDArray[np.void], at_s: int
) -> Packed:
    """Rows as an object.

    Args:
        contributor: who measured them.
        fabric: where.
        job_ids: ids of the jobs.
        job: index into `job_ids` of each row, shape (n,).
        block: MEASUREMENT, shape (n,).
        at_s: Unix time, of all of them; its day (UTC) is the partition.

    Returns:
        The object; the same rows give the same one.
    """
    order = np.lexsort([*(block[name] for name in _SORTED_BY), job])
    block, job = block[order], job[order]
    n_rows, version = len(block), _nccl_version(fabric.facts)
    constants = {
        "contributor": contributor, "fabric_id": fabric.fabric_id, "nccl_version": version,
        "tuner_abi": _tuner_abi(version), "measured_at_s": at_s,
    }  # fmt: skip
    ids = pyarrow.array(job_ids, pyarrow.string())
    columns = [
        ids.take(pyarrow.array(job))
        if field.name == "job_id"
        else pyarrow.array(block[field.name].astype(_NUMPY.get(field.name, np.int64))).cast(field.type)
        if field.name in _OF_BLOCK
        else pyarrow.repeat(pyarrow.scalar(constants[field.name], field.type), n_rows)
        for field in COLUMNS
    ]
    facts = json.dumps(dict(fabric.facts), sort_keys=True).encode()
    schema = COLUMNS.with_metadata({_MARK: str(VERSION).encode(), _FACTS: facts})
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns, schema), sink, compression="zstd")
    data = sink.getvalue()
    return Packed(f"{folder_of(fabric.fabric_id, at_s)}/{hashlib.sha256(data).hexdigest()}.parquet", data)


_NUMPY: Final = {"duration_us": np.float64, "is_default": np.bool_}


def folder_of(fabric_id: str, at_s: int) -> str:
    """The partition that rows of a fabric and a moment (Unix time) belong to."""
    day = datetime.fromtimestamp(at_s, timezone.utc).date().isoformat()
    return f"{fabric_folder(fabric_id)}/day={day}"


def fabric_folder(fabric_id: str) -> str:
    """Where all objects of a fabric lie."""
    return f"v{VERSION}/fabric={_quoted(fabric_id)}"


def decoding() -> Decoding:
    """The process in which objects are decoded; for one thread, and many objects."""
    return Decoding(f"{__name__}:checked", memory_mib=MEMORY_MIB, seconds=DECODE_S, most_bytes=2 * MAX_UNPACKED_BYTES)


_shared: Final = decoding()
_alone: Final = threading.Lock()
atexit.register(_shared.close)


def unpack(path: str, data: bytes, decode: Decoding | None = None) -> tuple[pyarrow.Table, Fabric]:
    """The rows of an object that was found, columns as in `COLUMNS`.

    Only its form is checked: numbers may still be nonsense.

    Args:
        path: where it was found, below the URL.
        data: its bytes.
        decode: where it is decoded; None: in one process for all such calls.

    Returns:
        Its rows, and the fabric that they are of.

    Raises:
        NotOurs: its name is not the hash of its bytes, it is damaged, too large, or not of this version.
    """
    named = _NAME.fullmatch(path.rpartition("/")[2])
    if named is None or hashlib.sha256(data).hexdigest() != named[1]:
        raise NotOurs("its name is not the hash of what is in it")
    try:
        if decode is not None:
            said = decode(path, data)
        else:
            with _alone:
                said = _shared(path, data)
    except Undecodable as error:
        raise NotOurs(str(error)) from error
    table = pyarrow.ipc.open_stream(said).read_all()
    facts = json.loads(table.schema.metadata[_FACTS])
    table = table.cast(COLUMNS.with_metadata(table.schema.metadata))
    return table, Fabric(table["fabric_id"][0].as_py(), facts)


def checked(path: str, data: bytes) -> bytes:
    """An object as an Arrow stream, its texts as dictionaries and its fabric's facts beside them.

    Raises:
        NotOurs: it is not believed.
    """
    try:
        file = pyarrow.parquet.ParquetFile(io.BytesIO(data))
        found, n_rows = file.schema_arrow, file.metadata.num_rows
        marks = found.metadata or {}
        if marks.get(_MARK) != str(VERSION).encode() or not found.equals(COLUMNS):
            raise NotOurs(f"it has not the columns of version {VERSION}")
        if not 0 < n_rows <= MAX_OBJECT_ROWS:
            raise NotOurs(f"it has {n_rows:,} rows")
        if len(described := marks.get(_FACTS, b"{}")) > MAX_FACTS_BYTES:
            raise NotOurs(f"it describes its fabric in {len(described):,} bytes")
        # One long text may stand in every row, and takes next to nothing in a file: dictionaries first.
        file = pyarrow.parquet.ParquetFile(io.BytesIO(data), read_dictionary=list(_TEXTS))
        table = file.read(use_threads=False)
        _refuse_texts(table)
        facts = _facts(json.loads(described))
        fabric_ids, contributors = (table[name].unique().to_pylist() for name in ("fabric_id", "contributor"))
    except (pyarrow.ArrowException, OSError, RecursionError) as error:
        raise NotOurs(f"it is damaged: {' '.join(str(error).split())[:120]}") from error
    if any(column.null_count for column in table.columns) or len(fabric_ids) != 1 or len(contributors) != 1:
        raise NotOurs("it has empty cells, or rows of several fabrics or contributors")
    if f"fabric={_quoted(fabric_ids[0])}/" not in path:
        raise NotOurs(f"it is of fabric {fabric_ids[0][:64]!r}, and lies elsewhere")
    table = table.replace_schema_metadata({_MARK: marks[_MARK], _FACTS: json.dumps(facts).encode()})
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def _refuse_texts(table: pyarrow.Table) -> None:
    """See that an object's texts, in full, take no more than a table may."""
    n_bytes = 0
    for name in _TEXTS:
        for dictionary in (chunk.dictionary for chunk in table[name].chunks):
            dictionary.validate(full=True)  # text that is no text
            if (pyarrow.compute.max(pyarrow.compute.utf8_length(dictionary)).as_py() or 0) > MAX_TEXT:
                raise NotOurs(f"it has a {name} of more than {MAX_TEXT} characters")
            n_bytes += table.num_rows * (pyarrow.compute.max(pyarrow.compute.binary_length(dictionary)).as_py() or 0)
    if n_bytes > MAX_UNPACKED_BYTES:
        raise NotOurs(f"it has up to {n_bytes:,} bytes of text")
    table.validate(full=True)


def _facts(found: object) -> dict[str, str | int | float | bool]:
    """What may go into a book of a fabric's description."""
    if not isinstance(found, dict) or len(found) > MAX_FACTS:
        raise NotOurs("it does not describe its fabric")
    return {name: value for name, value in found.items() if _is_fact(name) and _is_fact(value)}


def _is_fact(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_FACT_TEXT and not re.search("[\ud800-\udfff]", value)  # halves that JSON may name
    return isinstance(value, bool) or (
        isinstance(value, (int, float)) and -(2**63) <= value < 2**63 and math.isfinite(value)
    )


def _quoted(fabric_id: str) -> str:
    return quote(fabric_id, safe="")


def _nccl_version(facts: Mapping[str, str | int | float | bool]) -> int:
    version = facts.get("nccl_version", 0)
    return version if isinstance(version, int) and 0 <= version < 2**31 else 0


def _tuner_abi(nccl_version: int) -> int:
    """The tuner interface of a release, given as NCCL encodes its number; 0: unknown."""
    return Release((nccl_version // 10_000, nccl_version // 100 % 100)).tuner_abi
