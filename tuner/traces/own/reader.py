"""Reads the traces that `zerotune launch --log-trace` writes; docs/reference/formats.md describes them.

A file that ends in the middle of a member (its process was killed) gives everything before that
member. Any other damage raises TraceError with the member's offset.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from ....store.errors import TraceError
from ....store.trace_format import (
    MAX_MEMBER_BYTES,
    STEP_FIELDS,
    TRACE_FORMAT,
    TRACE_SUFFIX,
    TRACE_VERSION,
    RecordBlock,
    StepBlock,
    TraceEnd,
    TraceHeader,
    TraceMember,
)
from ....store.wire import OBSERVATION_FIELDS
from ..files import TraceFile, opened
from ..left_out import LeftOut
from ..records import Block, Summary

RECORD_DTYPE: Final = np.dtype(OBSERVATION_FIELDS)
STEP_DTYPE: Final = np.dtype(STEP_FIELDS)
_MARK_WITHIN: Final = 128
_decoder: Final[msgspec.msgpack.Decoder[TraceMember]] = msgspec.msgpack.Decoder(TraceMember)


@dataclass(frozen=True)
class OwnTrace:
    """One rank's trace: `records` of OBSERVATION_FIELDS, shape (n,), and `steps` of STEP_FIELDS, shape (m,)."""

    path: Path
    header: TraceHeader
    records: np.ndarray[Any, Any]
    steps: np.ndarray[Any, Any]
    n_dropped: int
    """Records that the rank lost before they reached the file."""
    ended: bool
    """False if the process ended without closing the file: up to a second of records is missing."""


def trace_files(path: Path) -> list[Path]:
    """The trace files at `path`: the file itself, or all of ours in that directory; TraceError if there is none."""
    if path.is_file():
        return [path]
    if not path.exists():
        raise TraceError(f"{path} does not exist", "name a trace file, or a directory of --log-trace")
    files = sorted(path.glob(f"*{TRACE_SUFFIX}"))
    if not files:
        raise TraceError(f"{path} holds no *{TRACE_SUFFIX} file", "name the directory given to --log-trace")
    return files


def matches(begin: bytes) -> bool:
    """Whether the file begins with our header, whose first field names the format."""
    return TRACE_FORMAT.encode() in begin[:_MARK_WITHIN]


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The records of one rank's file, without its steps."""
    ended = False
    for member in iter_members(path):
        if isinstance(member, TraceHeader):
            summary.facts.setdefault("fabric_id", member.fabric_id)
            summary.facts.setdefault("job_id", member.job_id)
        elif isinstance(member, RecordBlock):
            yield record_array(member, path)
        elif isinstance(member, TraceEnd):
            ended = True
            summary.skip(LeftOut.lost, member.n_dropped)
    if not ended:
        summary.fault(f"{path.name} ends early: its process did not end in good order")


def read_own(path: Path) -> OwnTrace:
    """One file, whole in memory; TraceError also for other versions."""
    members = iter_members(path)
    header = next(members)
    assert isinstance(header, TraceHeader)
    records: list[np.ndarray[Any, Any]] = []
    steps: list[np.ndarray[Any, Any]] = []
    n_dropped, ended = 0, False
    for member in members:
        if isinstance(member, RecordBlock):
            records.append(record_array(member, path))
            n_dropped = member.n_dropped
        elif isinstance(member, StepBlock):
            steps.append(_array(member, STEP_DTYPE, path))
        elif isinstance(member, TraceEnd):
            n_dropped, ended = member.n_dropped, True
    return OwnTrace(
        path=path,
        header=header,
        records=np.concatenate(records) if records else np.empty(0, RECORD_DTYPE),
        steps=np.concatenate(steps) if steps else np.empty(0, STEP_DTYPE),
        n_dropped=n_dropped,
        ended=ended,
    )


def iter_members(path: Path) -> Generator[TraceMember, None, None]:
    """The members of a trace in order, the header first; holds one member in memory.

    Raises:
        TraceAccessError: the system refuses to read it.
    """
    with opened(path) as file:
        yield from _checked(_members(file, path), path)


def record_array(block: RecordBlock, path: Path) -> np.ndarray[Any, Any]:
    """Observations of OBSERVATION_FIELDS, shape (n,); columns that the file lacks are 0."""
    return _array(block, RECORD_DTYPE, path)


def _checked(members: Iterator[tuple[int, bytes]], path: Path) -> Iterator[TraceMember]:
    seen_header = False
    for offset, body in members:
        try:
            member = _decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            if not seen_header:
                raise _not_a_trace(path) from error
            raise _damaged(path, f"the member at byte {offset} is not one of ours ({error})") from error
        if isinstance(member, TraceHeader):
            if seen_header:
                raise _damaged(path, f"a second header at byte {offset}")
            seen_header = True
            _check_version(member, path)
        elif not seen_header:
            raise _not_a_trace(path)
        yield member
    if not seen_header:
        raise _without_header(path)


def _without_header(path: Path) -> TraceError:
    n_bytes = path.stat().st_size
    what = f"is cut at byte {n_bytes:,}, within its header" if n_bytes else "is empty"
    return TraceError(f"{path} {what}", "copy it again; if its process died at once, log again")


def _check_version(header: TraceHeader, path: Path) -> None:
    if header.format != TRACE_FORMAT:
        raise _not_a_trace(path)
    if header.version != TRACE_VERSION:
        raise TraceError(
            f"{path} is of trace version {header.version}, this zerotune reads version {TRACE_VERSION}",
            f"read it with the release that wrote it ({header.written_by})",
        )


def _not_a_trace(path: Path) -> TraceError:
    return TraceError(f"{path} is not a zerotune trace", "name a file that launch --log-trace wrote")


def _damaged(path: Path, problem: str) -> TraceError:
    return TraceError(f"{path}: {problem}", "the file is damaged; copy it again from where it was written")


def _too_large(path: Path, what: str) -> TraceError:
    most = f"{MAX_MEMBER_BYTES >> 20} MiB"
    return TraceError(
        f"{path}: {what} than {most}, and no trace of ours has such", "name a file that launch --log-trace wrote"
    )


def _members(file: TraceFile, path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, unpacked bytes) of each whole member; a truncated last one is left out."""
    parts: list[bytes] = []
    try:
        for part, is_end in file.pieces():
            parts.append(part)
            if sum(map(len, parts)) > MAX_MEMBER_BYTES:
                raise _too_large(path, f"the member at byte {file.member_begin} unpacks to more")
            if is_end:
                yield file.member_begin, b"".join(parts)
                parts = []
    except zlib.error as error:
        if file.member_begin == 0:
            raise _not_a_trace(path) from error
        raise _damaged(path, f"the member at byte {file.member_begin} cannot be unpacked ({error})") from error


def _array(block: RecordBlock | StepBlock, dtype: np.dtype[Any], path: Path) -> np.ndarray[Any, Any]:
    n_records = block.n_records
    columns = {name: block.columns[name] for name in dtype.names or () if name in block.columns}
    fits = columns and all(len(data) == n_records * dtype[name].itemsize for name, data in columns.items())
    if not fits:
        raise _damaged(path, f"a block of {n_records} records has columns of another length")
    if n_records * dtype.itemsize > MAX_MEMBER_BYTES:  # a small block of one narrow column becomes a large array
        raise _too_large(path, f"a block of {n_records:,} records takes more")
    if n_records == 0:
        return np.empty(0, dtype)
    array = np.zeros(n_records, dtype)
    for name, data in columns.items():
        planes = np.frombuffer(data, np.uint8).reshape(-1, n_records)
        array[name] = np.ascontiguousarray(planes.T).view(dtype[name]).reshape(n_records)
    return array
