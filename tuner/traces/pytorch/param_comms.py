"""PARAM's comms traces: a JSON array of calls, sizes in elements, no durations of their own.

PARAM writes `in_msg_size`, `world_size`, `pg_id`; its objects in memory, which others dump, say `inMsgSize`,
`worldSize`, `pgId`. An "init" entry lists the ranks of the group that later entries name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from zerotune.agent.nccl.catalog import find_collective
from zerotune.store.records import Collective, Observation
from zerotune.tuner.traces.files import JsonStream
from zerotune.tuner.traces.left_out import LeftOut
from zerotune.tuner.traces.pytorch.flight_recorder import rank_of
from zerotune.tuner.traces.records import (
    MAX_BYTES,
    UNKNOWN_U4,
    Block,
    SequenceNumbers,
    Summary,
    blocks_of,
    communicator_id,
    datatype_bytes,
    datatype_index,
    is_impossible,
    sized_call,
)

_NAMES: Final = {
    "in": ("in_msg_size", "inMsgSize"),
    "out": ("out_msg_size", "outMsgSize"),
    "world": ("world_size", "worldSize"),
    "group": ("pg_id", "pgId"),
    "ranks": ("global_ranks", "groupRanks"),
    "start": ("startTime_ns", "startTimeNs"),
}
_SIZES: Final = tuple(f'"{name}"'.encode() for name in _NAMES["in"])
_POINT_TO_POINT: Final = (Collective.send, Collective.recv, Collective.send_recv)
MAX_RANKS: Final = 1 << 20


def matches(begin: bytes) -> bool:
    """An array of objects that name their collective."""
    return begin.lstrip().startswith(b"[") and b'"comms"' in begin and any(name in begin for name in _SIZES)


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The collectives of one rank."""
    yield from blocks_of(_observations(path, summary))


def _observations(path: Path, summary: Summary) -> Iterator[Observation]:
    stream = JsonStream(path)
    counters = SequenceNumbers()
    groups: dict[str, list[Any]] = {}
    for key, entries in stream.members():
        if key == "" and isinstance(entries, Iterator):
            for entry in entries:
                if isinstance(entry, Mapping) and isinstance(ranks := _told(entry, "ranks"), list) and ranks:
                    groups[_group(entry)] = ranks[:MAX_RANKS]
                observation = _observation(entry, groups, rank_of(path), counters, summary, path.name)
                if observation is not None:
                    yield observation
    if stream.truncated:
        summary.fault(f"{path.name} ends early")


def _observation(
    entry: Any,
    groups: Mapping[str, list[Any]],
    rank: int | None,
    counters: SequenceNumbers,
    summary: Summary,
    file_name: str,
) -> Observation | None:
    name = entry.get("comms") if isinstance(entry, Mapping) else None
    collective = find_collective(name) if isinstance(name, str) else None
    if collective is None:
        summary.skip(LeftOut.not_a_collective)
        return None
    if collective in _POINT_TO_POINT:
        summary.skip(LeftOut.point_to_point)
        return None
    dtype, world, group = entry.get("dtype"), _told(entry, "world"), _group(entry)
    ranks = groups.get(group, [])
    index = datatype_index(dtype) if isinstance(dtype, str) else None
    width = None if index is None else datatype_bytes(index)
    elements = [_told(entry, side) for side in ("in", "out")]
    if any(map(is_impossible, elements)):
        summary.skip(LeftOut.impossible_size)
        return None
    sides = [_side(n_elements, width) for n_elements in elements]
    told = {"its group": len(ranks), "its world size": world if type(world) is int and 0 < world < 1 << 31 else 0}
    message_bytes, n_ranks = sized_call(collective, sides, told, summary, file_name)
    if not message_bytes:
        summary.skip(LeftOut.bytes_unknown)
        return None
    comm_id = communicator_id(group, ranks or ("" if group else n_ranks))  # without a name, others if of other sizes
    start = _told(entry, "start")
    return Observation(
        sequence=counters.next(comm_id, collective),
        collective=collective,
        message_bytes=message_bytes,
        n_ranks=n_ranks,
        rank=UNKNOWN_U4 if rank is None else rank,
        comm_id=comm_id,
        datatype=dtype,
        start_ns=int(start) if isinstance(start, int | float) and 0 < start < 1 << 62 else None,
    )


def _told(entry: Mapping[str, Any], what: str) -> Any:
    """A value under either of its names."""
    first, second = _NAMES[what]
    return entry.get(first, entry.get(second))


def _group(entry: Mapping[str, Any]) -> str:
    identity = _told(entry, "group")
    return str(identity)[:200] if isinstance(identity, str | int) else ""


def _side(n_elements: Any, width: int | None) -> int | None:
    if type(n_elements) is not int or width is None or not 0 <= n_elements <= MAX_BYTES:
        return None
    return n_elements * width
