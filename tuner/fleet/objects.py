"""Measurements as Parquet objects: content, names, and checks of objects from others.

An object holds rows of one fabric by one contributor, and its name is the SHA-256 of its bytes:

    v1/fabric=FABRIC_ID/day=YYYY-MM-DD/SHA256.parquet

A contributor is a key, which signs the object's values, not Parquet's bytes. Anybody may have written unsigned rows,
which all have the contributor `UNSIGNED`.

`fabric` and `day` are partitions as in Hive, DuckDB and Spark (percent-encoded if necessary). No object is ever
overwritten; other columns would be another version beside this one.
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

from ...agent.nccl.release import Release
from ...store.foreign.decoding import Decoding, Undecodable
from .book import MAX_FACTS
from .signing import Signer, is_key, is_signed

VERSION: Final = 1
MAX_OBJECT_BYTES: Final = 64 * 2**20
MAX_OBJECT_ROWS: Final = 1_000_000
"""Most rows of an object; a daemon writes at most half of it at a time."""
MAX_UNPACKED_BYTES: Final = 128 * 2**20
"""Unpacked bytes of all texts of one object; more is a bomb."""
MEMORY_MIB: Final = 768
DECODE_S: Final = 60.0
MAX_TEXT: Final = 512
"""Characters of an id, and of a contributor's name."""
MAX_FACT_TEXT: Final = 4096
"""Characters of one fact of a fabric, as in books."""
MAX_FACTS_BYTES: Final = 2**17
"""Bytes of a fabric's facts as JSON: a daemon takes 16,384 characters, each of which may take six bytes."""
UNSIGNED: Final = ""
_MARK: Final = b"zerotune.fleet"
_FACTS: Final = b"zerotune.fabric"
_CALLED: Final = b"zerotune.contributor"
"""Metadata with the contributor's own name."""
_SIGNATURE: Final = b"zerotune.signature"
_CONTENT: Final = b"zerotune.content"
"""Metadata that only a decoding process returns."""
_DOMAIN: Final = b"zerotune measurements 1\n"
"""Beginning of the signed bytes, so that no signature of other data fits."""

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
"""Keys for `lexsort`, the last one first. Equal values side by side compress well."""
_NAME: Final = re.compile(r"([0-9a-f]{64})\.parquet")


class Fabric(NamedTuple):
    """The fabric of measurements."""

    fabric_id: str
    facts: Mapping[str, str | int | float | bool]
    """The ranks' description of the fabric; `nccl_version` as NCCL encodes it."""


class Packed(NamedTuple):
    """An object: its path below the URL, and its bytes."""

    path: str
    data: bytes


class Unpacked(NamedTuple):
    """The checked content of an object."""

    rows: pyarrow.Table
    """Columns as in `COLUMNS`; numbers may still be impossible."""
    fabric: Fabric
    contributor: str
    """The key that signed the rows, or UNSIGNED."""
    called: str
    """The name of the key's owner."""
    content: str
    """Digest of the signed values, equal for all files with them; empty: unsigned."""


class InvalidObject(ValueError):
    """An object is refused; the text says why."""


def pack(
    contributor: str,
    fabric: Fabric,
    job_ids: list[str],
    job: NDArray[np.int64],
    block: NDArray[np.void],
    at_s: int,
    signer: Signer | None,
) -> Packed:
    """Rows (MEASUREMENT, shape (n,)) of one fabric as an object; equal rows give equal objects.

    `job` has the index of each row's id in `job_ids`. `at_s` is the Unix time of all rows, and its day (UTC) is the
    partition. Without a signer, the object is unsigned.
    """
    order = np.lexsort([*(block[name] for name in _SORTED_BY), job])
    block, job = block[order], job[order]
    n_rows, version = len(block), _nccl_version(fabric.facts)
    constants = {
        "contributor": contributor if signer is None else signer.public_hex, "fabric_id": fabric.fabric_id,
        "nccl_version": version, "tuner_abi": _tuner_abi(version), "measured_at_s": at_s,
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
    marks = {_MARK: str(VERSION).encode(), _FACTS: facts}
    table = pyarrow.table(columns, COLUMNS)
    if signer is not None:
        marks[_CALLED] = contributor.encode(errors="replace")
        marks[_SIGNATURE] = signer.sign(_DOMAIN + _content(table, marks)).encode()
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table.replace_schema_metadata(marks), sink, compression="zstd")
    data = sink.getvalue()
    return Packed(f"{folder_of(fabric.fabric_id, at_s)}/{hashlib.sha256(data).hexdigest()}.parquet", data)


_NUMPY: Final = {"duration_us": np.float64, "is_default": np.bool_}


def folder_of(fabric_id: str, at_s: int) -> str:
    """The partition for rows of a fabric and a Unix time."""
    day = datetime.fromtimestamp(at_s, timezone.utc).date().isoformat()
    return f"{fabric_folder(fabric_id)}/day={day}"


def fabric_folder(fabric_id: str) -> str:
    """The folder of all objects of a fabric."""
    return f"v{VERSION}/fabric={_quoted(fabric_id)}"


def decoding() -> Decoding:
    """The process that decodes objects; for one thread and many objects."""
    return Decoding(f"{__name__}:checked", memory_mib=MEMORY_MIB, seconds=DECODE_S, most_bytes=2 * MAX_UNPACKED_BYTES)


_shared: Final = decoding()
_alone: Final = threading.Lock()
atexit.register(_shared.close)


def unpack(path: str, data: bytes, decode: Decoding | None = None) -> Unpacked:
    """The content of an object from others; without `decode`, one process is shared by all such calls.

    Raises:
        InvalidObject: its name is not the hash of its bytes, or it is damaged, too large, of another version or wrongly
            signed.
    """
    named = _NAME.fullmatch(path.rpartition("/")[2])
    if named is None or hashlib.sha256(data).hexdigest() != named[1]:
        raise InvalidObject("its name is not the hash of what is in it")
    try:
        if decode is not None:
            stream = decode(path, data)
        else:
            with _alone:
                stream = _shared(path, data)
    except Undecodable as error:
        raise InvalidObject(str(error)) from error
    table = pyarrow.ipc.open_stream(stream).read_all()
    marks = table.schema.metadata
    table = table.cast(COLUMNS.with_metadata(marks))
    fabric = Fabric(table["fabric_id"][0].as_py(), json.loads(marks[_FACTS]))
    return Unpacked(table, fabric, table["contributor"][0].as_py(), marks[_CALLED].decode(), marks[_CONTENT].decode())


def checked(path: str, data: bytes) -> bytes:
    """An object as an Arrow stream, its texts as dictionaries and its fabric's facts beside them; or InvalidObject."""
    try:
        file = pyarrow.parquet.ParquetFile(io.BytesIO(data))
        found, n_rows = file.schema_arrow, file.metadata.num_rows
        marks = found.metadata or {}
        if marks.get(_MARK) != str(VERSION).encode() or not found.equals(COLUMNS):
            raise InvalidObject(f"it has not the columns of version {VERSION}")
        if not 0 < n_rows <= MAX_OBJECT_ROWS:
            raise InvalidObject(f"it has {n_rows:,} rows")
        if len(described := marks.get(_FACTS, b"{}")) > MAX_FACTS_BYTES:
            raise InvalidObject(f"it describes its fabric in {len(described):,} bytes")
        # A long text repeated in every row is small in a file, so dictionaries are checked first.
        file = pyarrow.parquet.ParquetFile(io.BytesIO(data), read_dictionary=list(_TEXTS))
        table = file.read(use_threads=False)
        _refuse_texts(table)
        facts = _facts(json.loads(described))
        fabric_ids, contributors = (table[name].unique().to_pylist() for name in ("fabric_id", "contributor"))
    except (pyarrow.ArrowException, OSError, RecursionError) as error:
        raise InvalidObject(f"it is damaged: {' '.join(str(error).split())[:120]}") from error
    if any(column.null_count for column in table.columns) or len(fabric_ids) != 1 or len(contributors) != 1:
        raise InvalidObject("it has empty cells, or rows of several fabrics or contributors")
    if f"fabric={_quoted(fabric_ids[0])}/" not in path:
        raise InvalidObject(f"it is of fabric {fabric_ids[0][:64]!r}, and lies elsewhere")
    metadata = {_MARK: marks[_MARK], _FACTS: json.dumps(facts).encode(), _CALLED: b"unsigned", _CONTENT: b""}
    if (signature := marks.get(_SIGNATURE)) is None:
        nobody = pyarrow.repeat(pyarrow.scalar(UNSIGNED), table.num_rows).dictionary_encode()
        table = table.set_column(0, COLUMNS.field("contributor").with_type(nobody.type), nobody)
    else:
        key, content = contributors[0], _content(table, marks)
        if not is_key(key) or not is_signed(key, signature.decode("ascii", "replace"), _DOMAIN + content):
            raise InvalidObject(f"its signature is not one of {key[:16]!r} for what is in it")
        if len(called := marks.get(_CALLED, b"").decode()) > MAX_TEXT:
            raise InvalidObject(f"its contributor is called by more than {MAX_TEXT} characters")
        metadata |= {_CALLED: called.encode(), _CONTENT: content.hex().encode()}
    table = table.replace_schema_metadata(metadata)
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def _content(table: pyarrow.Table, marks: Mapping[bytes, bytes]) -> bytes:
    """Digest of rows without empty cells, their fabric and contributor, independent of Parquet and Arrow.

    Each part is its number of bytes and the bytes. Parts are the facts, the contributor's name, and the columns in
    order. Numbers are little-endian; texts are a sorted JSON list of distinct texts, and each row's index in it.
    """
    found = hashlib.sha256()

    def add(part: bytes) -> None:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)

    for mark in (_FACTS, _CALLED):
        add(marks.get(mark, b""))
    for field in COLUMNS:
        column = table[field.name]
        if pyarrow.types.is_string(field.type):
            encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
            texts, at = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
            used = sorted({texts[one] for one in np.flatnonzero(np.bincount(at))})
            add(json.dumps(used).encode())
            place = {text: number for number, text in enumerate(used)}
            numbers = np.array([place.get(text, 0) for text in texts], np.int32)[at]
        else:
            numbers = column.to_numpy()
        if numbers.dtype.kind == "f":
            numbers = np.where(np.isnan(numbers), np.nan, numbers)  # NaN has many encodings, and Parquet keeps one
        add(numbers.astype(numbers.dtype.newbyteorder("<")).tobytes())
    return found.digest()


def _refuse_texts(table: pyarrow.Table) -> None:
    """Refuse an object whose unpacked texts take more than a table may."""
    n_bytes = 0
    for name in _TEXTS:
        for dictionary in (chunk.dictionary for chunk in table[name].chunks):
            dictionary.validate(full=True)  # refuses invalid text
            if (pyarrow.compute.max(pyarrow.compute.utf8_length(dictionary)).as_py() or 0) > MAX_TEXT:
                raise InvalidObject(f"it has a {name} of more than {MAX_TEXT} characters")
            n_bytes += table.num_rows * (pyarrow.compute.max(pyarrow.compute.binary_length(dictionary)).as_py() or 0)
    if n_bytes > MAX_UNPACKED_BYTES:
        raise InvalidObject(f"it has up to {n_bytes:,} bytes of text")
    table.validate(full=True)


def _facts(found: object) -> dict[str, str | int | float | bool]:
    """The part of a fabric's description that books may have."""
    if not isinstance(found, dict) or len(found) > MAX_FACTS:
        raise InvalidObject("it does not describe its fabric")
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
