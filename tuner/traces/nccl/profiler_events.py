"""Events of NCCL profiler plugins as JSON lines: collectives, their kernel channels, and state changes.

The collective's own stop means that it was enqueued; its time is from the first channel's start to the last
channel's stop on the GPU's clock. An all_gather's count is bytes per rank, a reduce_scatter's elements per rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from ....agent.nccl.catalog import find_collective, parse_algorithm, parse_protocol
from ....store.errors import TraceError, UserError
from ....store.records import Algorithm, Collective, Observation, Protocol, TimingSource
from ..files import line_chunks
from ..left_out import LeftOut
from ..records import MAX_BYTES, MAX_CHANNELS, UNKNOWN_U4, Block, Summary, blocks_of, element_bytes


class _Details(msgspec.Struct):
    nranks: int = 0
    func: str = ""
    seq: int = 0
    algo: str = ""
    proto: str = ""
    channels: int = 0
    count: int = 0
    dtype: str = ""
    pTimer: int = 0


class _Event(msgspec.Struct):
    type: str = ""
    name: str = ""
    commId: int = 0
    rank: int = 0
    eventAddr: str = ""
    parentObj: str = ""
    pTimer: int = 0
    details: _Details | None = None


@dataclass
class _Pending:
    event: _Event
    details: _Details
    starts_ns: dict[str, int]
    stops_ns: dict[str, int]


_decoder: Final = msgspec.json.Decoder(_Event)
_COLLECTIVE: Final = "ncclProfileColl"
_CHANNEL: Final = "ncclProfileKernelCh"
_CHANNEL_STOP: Final = "KernelChStop"


def matches(begin: bytes) -> bool:
    """Whether the file has JSON lines of profiler events."""
    return begin.lstrip().startswith(b"{") and (b'"ProfilerLifecycle"' in begin or b'"ncclProfile' in begin)


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The collectives of the ranks in one process."""
    yield from blocks_of(_observations(path, summary))


def _observations(path: Path, summary: Summary) -> Iterator[Observation]:
    pending: dict[str, _Pending] = {}
    channel_owner: dict[str, str] = {}
    early_stops: dict[str, int] = {}
    n_ranks: dict[int, int] = {}
    n_good = 0
    for event in _events(path, summary):
        n_good += 1
        details = event.details or _Details()
        if event.type == "ProfilerLifecycle" and details.nranks:
            n_ranks[event.commId] = details.nranks
        elif event.type == _COLLECTIVE:
            # Event addresses are reused, so the event at this address before is complete.
            previous = pending.pop(event.eventAddr, None)
            if previous is not None:
                yield from _finished(previous, n_ranks, summary)
            pending[event.eventAddr] = _Pending(event, details, {}, {})
        elif event.type == _CHANNEL:
            channel_owner[event.eventAddr] = event.parentObj
            owner = pending.get(event.parentObj)
            if owner is not None:
                owner.starts_ns[event.eventAddr] = details.pTimer
                if event.eventAddr in early_stops:
                    owner.stops_ns[event.eventAddr] = early_stops.pop(event.eventAddr)
        elif event.name == _CHANNEL_STOP:
            owner = pending.get(channel_owner.get(event.eventAddr, ""))
            if owner is not None and event.eventAddr in owner.starts_ns and event.eventAddr not in owner.stops_ns:
                owner.stops_ns[event.eventAddr] = event.pTimer
            else:
                early_stops[event.eventAddr] = event.pTimer
    for last in pending.values():
        yield from _finished(last, n_ranks, summary)
    if not n_good:
        raise TraceError(f"{path} has no profiler event", "name another file or format")


def _events(path: Path, summary: Summary) -> Iterator[_Event]:
    for chunk in line_chunks(path, summary):
        for line in chunk.split(b"\n"):
            text = line.strip().rstrip(b",")
            if not text:
                continue
            try:
                yield _decoder.decode(text)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                summary.skip(LeftOut.damaged_line)


def _finished(pending: _Pending, n_ranks_of: dict[int, int], summary: Summary) -> Iterator[Observation]:
    event, details = pending.event, pending.details
    collective = find_collective(details.func)
    width = element_bytes(details.dtype)
    n_ranks = n_ranks_of.get(event.commId, 0)
    if collective is None or width is None:
        summary.skip(LeftOut.unknown_operation)
        return
    message_bytes = details.count * (1 if collective is Collective.all_gather else width)
    if collective in (Collective.all_gather, Collective.reduce_scatter):
        message_bytes *= n_ranks
    if not 0 < message_bytes <= MAX_BYTES:
        summary.skip(LeftOut.bytes_unknown)
        return
    algorithm, protocol = _setting(details)
    duration_us = None
    start_ns = min(pending.starts_ns.values(), default=0)
    complete = len(pending.stops_ns) == len(pending.starts_ns) == details.channels > 0
    if complete and 0 < (elapsed_ns := max(pending.stops_ns.values()) - start_ns) < 1 << 50:
        duration_us = elapsed_ns / 1000.0
    yield Observation(
        sequence=_within(details.seq, UNKNOWN_U4),
        collective=collective,
        message_bytes=message_bytes,
        n_ranks=_within(n_ranks, UNKNOWN_U4),
        rank=_within(event.rank, UNKNOWN_U4),
        comm_id=_within(event.commId, (1 << 64) - 1),
        datatype=details.dtype,
        algorithm=algorithm,
        protocol=protocol,
        n_channels=details.channels if 0 < details.channels <= MAX_CHANNELS else None,
        start_ns=start_ns if 0 < start_ns < 1 << 62 else None,
        duration_us=duration_us,
        timing_source=TimingSource.none if duration_us is None else TimingSource.gpu_kernel,
    )


def _setting(details: _Details) -> tuple[Algorithm | None, Protocol | None]:
    try:
        return parse_algorithm(details.algo), parse_protocol(details.proto)
    except UserError:
        return None, None


def _within(value: Any, most: int) -> int:
    return int(value) if 0 <= value <= most else 0
