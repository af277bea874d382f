"""PARAM's comms traces: a JSON array of calls, sizes in elements, no durations of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agent.nccl.catalog import find_collective
from store.records import Observation
from tuner.traces.files import JsonStream
from tuner.traces.flight_recorder import rank_of
from tuner.traces.records import (
    MAX_BYTES,
    UNKNOWN_U4,
    Block,
    Counters,
    Summary,
    blocks_of,
    communicator_id,
    datatype_bytes,
    datatype_index,
    total_bytes,
)


def matches(begin: bytes) -> bool:
    """An array of objects that name their collective."""
    return begin.lstrip().startswith(b"[") and b'"comms"' in begin and b"MsgSize" in begin


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The collectives of one rank."""
    yield from blocks_of(_observations(path, summary))


def _observations(path: Path, summary: Summary) -> Iterator[Observation]:
    stream = JsonStream(path)
    counters = Counters()
    for key, entries in stream.members():
        if key == "" and isinstance(entries, Iterator):
            for entry in entries:
                observation = _observation(entry, rank_of(path), counters, summary)
                if observation is not None:
                    yield observation
    if stream.truncated:
        summary.note(f"{path.name} ends early")


def _observation(entry: Any, rank: int | None, counters: Counters, summary: Summary) -> Observation | None:
    name = entry.get("comms") if isinstance(entry, Mapping) else None
    collective = find_collective(name) if isinstance(name, str) else None
    if collective is None:
        summary.skip("not a collective (waits, barriers, compute)")
        return None
    dtype, ranks = entry.get("dtype"), entry.get("groupRanks")
    world = entry.get("worldSize")
    n_ranks = len(ranks) if isinstance(ranks, list) and ranks else world if type(world) is int else 0
    index = datatype_index(dtype) if isinstance(dtype, str) else None
    width = None if index is None else datatype_bytes(index)
    sides = [_side(entry.get(key), width) for key in ("inMsgSize", "outMsgSize")]
    message_bytes = total_bytes(collective, sides[0], sides[1], n_ranks)
    if not message_bytes:
        summary.skip("bytes unknown")
        return None
    group = entry.get("pgId")
    comm_id = communicator_id(
        group if isinstance(group, str | int) else "", ranks if isinstance(ranks, list) and len(ranks) < 65536 else ""
    )
    start = entry.get("startTimeNs")
    return Observation(
        sequence=counters.next(comm_id, collective),
        collective=collective,
        message_bytes=message_bytes,
        n_ranks=n_ranks if 0 <= n_ranks <= UNKNOWN_U4 else 0,
        rank=UNKNOWN_U4 if rank is None else rank,
        comm_id=comm_id,
        datatype=dtype,
        start_ns=int(start) if isinstance(start, int | float) and 0 < start < 1 << 62 else None,
    )


def _side(n_elements: Any, width: int | None) -> int | None:
    if type(n_elements) is not int or width is None or not 0 <= n_elements <= MAX_BYTES:
        return None
    return n_elements * width
