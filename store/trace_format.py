"""The format of the trace file that `zerotune launch --log-trace` writes.

A trace is a gzip file (RFC 1952) of many members; each member holds one MessagePack map, one of the
tagged structs below. Both are standard containers, so `zcat trace | msgpack-tool` reads it. A member
is complete or absent: kill -9 costs at most the one being written. docs/reference/formats.md has the rest.

Columns are little-endian arrays in *byte planes*: first the lowest byte of every value, then the next
one, and so on, which gzip packs better and faster than whole values.
"""

from __future__ import annotations

import zlib
from typing import Final

import msgspec

from .wire import Facts, Id, Name

TRACE_VERSION: Final = 1
TRACE_FORMAT: Final = "zerotune-trace"
TRACE_SUFFIX: Final = ".zttrace"
MAX_MEMBER_BYTES: Final = 16 * 2**20
"""Largest decompressed member; a reader refuses bigger ones before they fill memory."""

STEP_FIELDS: Final = [
    ("step", "<u4"),
    ("epoch", "<u4"),
    ("duration_us", "<f8"),
    ("exposed_us", "<f8"),
    ("memory_pressure", "<f4"),
]
"""numpy dtype fields of a step; NaN stands for a StepRecord's None."""

_GZIP_WINDOW_BITS: Final = 31
_FASTEST: Final = 1


class TraceHeader(msgspec.Struct, frozen=True, tag="header"):
    """First member of every trace: its job and rank. `clock` is `emulated` or `device`."""

    format: str
    version: int
    job_id: Id
    rank: int
    n_ranks: int
    fabric_id: Name
    fabric: Facts
    clock: str
    started_at_s: float
    written_by: str


class RecordBlock(msgspec.Struct, frozen=True, tag="records"):
    """Columns of `zerotune.store.wire.OBSERVATION_FIELDS`; `n_dropped` counts records lost so far."""

    n_records: int
    columns: dict[str, bytes]
    n_dropped: int = 0


class StepBlock(msgspec.Struct, frozen=True, tag="steps"):
    """Columns of `STEP_FIELDS`."""

    n_records: int
    columns: dict[str, bytes]


class TraceEnd(msgspec.Struct, frozen=True, tag="end"):
    """Last member of a trace whose process ended normally."""

    n_records: int
    n_dropped: int


TraceMember = TraceHeader | RecordBlock | StepBlock | TraceEnd

_encoder = msgspec.msgpack.Encoder()


def pack_member(message: TraceMember) -> bytes:
    """One whole gzip member that holds `message`."""
    packer = zlib.compressobj(_FASTEST, zlib.DEFLATED, _GZIP_WINDOW_BITS)
    return packer.compress(_encoder.encode(message)) + packer.flush()
