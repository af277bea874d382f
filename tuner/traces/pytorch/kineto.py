"""Kineto (Chrome) traces of PyTorch's profiler: GPU kernels of collectives, one file per rank.

From PyTorch 2.4 on, the kernels (or the `record_param_comms` call that launched them) have the sizes. In older traces
the call around the launch has the input's dimensions, and torch's operator around that call has those of both sides.
Sizes are in elements. `RING_LL` in a kernel's name is a template's name, not the protocol that ran. So algorithm and
protocol stay unknown; the grid's width is the channel count. A kernel's time includes waiting for the other ranks. A
trace of only the CPU has the calls without their times.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from ....agent.nccl.catalog import find_collective
from ....store.errors import TraceError
from ....store.records import Observation, TimingSource
from ..files import Batches, JsonStream
from ..left_out import LeftOut
from ..records import (
    FLAG_COUNTED,
    MAX_BYTES,
    MAX_CHANNELS,
    POINT_TO_POINT,
    UNKNOWN_U4,
    Block,
    SequenceNumbers,
    Summary,
    blocks_of,
    communicator_id,
    element_bytes,
    is_impossible,
    sized_call,
)
from .kineto_sizes import group_sizes, integer, n_listed, rank_count, side_bytes

_CALLS: Final = ("record_param_comms", "nccl:")
_LAUNCHES: Final = ("cudaLaunch", "cuLaunch", "hipLaunch", "hipExt")
_OPERATORS: Final = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")
"""Operators whose first two arguments are one rank's output and input; only they have an old all-gather's total."""
_CALLS_OR_LAUNCHES: Final = (*_CALLS, *_OPERATORS, *_LAUNCHES)
_KERNELS: Final = ("kernel", "Kernel")
# A trace repeats few names, so each is looked up once.
_collective_of: Final = lru_cache(maxsize=1024)(find_collective)
_width_of: Final = lru_cache(maxsize=1024)(element_bytes)
_communicator_of: Final = lru_cache(maxsize=1024)(communicator_id)


class _Event(msgspec.Struct, gc=False):
    """A trace event; its arguments are decoded only if they are needed."""

    name: Any = None
    cat: Any = None
    ts: Any = None
    dur: Any = None
    pid: Any = None
    tid: Any = None
    args: msgspec.Raw = msgspec.Raw(b"null")


_BATCHES: Final = Batches('"ph"', msgspec.json.Decoder(list[_Event]))


def matches(begin: bytes) -> bool:
    """Whether the file is a trace-event document, with or without the object around it."""
    start = begin.lstrip()
    if start.startswith(b"{"):
        return b'"traceEvents"' in begin or (b'"schemaVersion"' in begin and b'"deviceProperties"' in begin)
    return start.startswith(b"[") and b'"ph"' in begin[:4096]


@dataclass
class _Kernel:
    name: str
    start_us: float
    duration_us: float
    n_channels: int
    external_id: int
    correlation: int
    args: Mapping[str, Any] | None


@dataclass
class _Events:
    """Kept events of a trace: its collectives, and the place of each launch."""

    rank: int | None = None
    world_size: int | None = None
    groups: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Name of a process group -> source of its number of ranks -> that number."""
    base_ns: int = 0
    kernels: list[_Kernel] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    """Devices on which the kernels ran."""
    is_counted: bool = False
    """Whether calls have no numbers, and are counted instead."""
    args: dict[int, tuple[float, Mapping[str, Any]]] = field(default_factory=dict)
    """External id -> start and arguments of the call that launched the kernel."""
    calls: dict[int, list[tuple[float, float, str, Mapping[str, Any]]]] = field(default_factory=dict)
    """Thread -> (start, end, name, arguments) of calls with dimensions."""
    operators: dict[int, list[tuple[float, float, str, Mapping[str, Any]]]] = field(default_factory=dict)
    """Thread -> (start, end, name, arguments) of the operators around such calls."""
    places: dict[int, tuple[float, int]] = field(default_factory=dict)
    """External id -> (start, thread) of calls and operators."""
    launch_correlation: array[int] = field(default_factory=lambda: array("q"))
    launch_us: array[float] = field(default_factory=lambda: array("d"))
    launch_thread: array[int] = field(default_factory=lambda: array("q"))


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The collectives of one rank, in the order of their kernels."""
    events = _collect(path, summary)
    if len(events.devices) > 1:
        raise TraceError(
            f"{path} has collectives of several devices (pid {', '.join(sorted(events.devices)[:4])})",
            "give the traces of single ranks, as a folder, not merged into one file",
        )
    for block in blocks_of(_observations(events, summary, path.name)):
        block["flags"] |= FLAG_COUNTED if events.is_counted else 0
        yield block


def _collect(path: Path, summary: Summary) -> _Events:
    events = _Events()
    stream = JsonStream(path, ("traceEvents",), _BATCHES)
    seen = False
    for key, value in stream.members():
        if key in ("traceEvents", "") and isinstance(value, Iterator):
            seen = True
            for event in value:
                if isinstance(event, _Event):
                    if _may_matter(event.name, event.cat):
                        _take({**msgspec.structs.asdict(event), "args": _decoded(event.args, summary)}, events, summary)
                elif isinstance(event, dict):
                    _take(event, events, summary)
        elif key == "distributedInfo" and isinstance(value, Mapping):
            events.rank, events.groups = integer(value.get("rank")), group_sizes(value.get("pg_config"))
            events.world_size = integer(value.get("world_size"))
            summary.facts["nccl_version"] = value.get("nccl_version")
        elif key == "baseTimeNanoseconds":
            events.base_ns = integer(value) or 0
    if stream.truncated:
        summary.fault(f"{path.name} ends early")
    elif not seen:
        raise TraceError(f"{path} has no trace events", "name a file that torch.profiler exported")
    return events


def _may_matter(name: Any, category: Any) -> bool:
    return isinstance(name, str) and (
        (category in _KERNELS and "nccl" in name.lower()) or name.startswith(_CALLS_OR_LAUNCHES)
    )


def _decoded(raw: msgspec.Raw, summary: Summary) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:  # a number out of any range, for example
        summary.skip(LeftOut.no_entry)
        return None


def _take(event: dict[str, Any], events: _Events, summary: Summary) -> None:
    name, args = event.get("name"), event.get("args")
    if not isinstance(name, str) or not isinstance(args, dict):
        return
    category = str(event.get("cat", ""))[:32].lower()
    start, duration = event.get("ts"), event.get("dur")
    is_kernel = category == "kernel" and "nccl" in name.lower()
    if not isinstance(start, int | float) or not math.isfinite(start) or abs(start) > 1e17:
        summary.skip(LeftOut.impossible_value, int(is_kernel))
        return
    if category == "kernel":
        if is_kernel:
            grid = args.get("grid")
            events.devices.add(str(event.get("pid"))[:16])
            width = grid[0] if isinstance(grid, list) and grid and type(grid[0]) is int else 0
            events.kernels.append(
                _Kernel(
                    name,
                    float(start),
                    float(duration) if isinstance(duration, int | float) else -1.0,
                    width if 0 < width <= MAX_CHANNELS else 0,
                    integer(args.get("External id", args.get("external id"))) or -1,
                    integer(args.get("correlation")) or -1,
                    args if "Collective name" in args else None,
                )
            )
    elif name.startswith((*_CALLS, *_OPERATORS)):
        external_id = integer(args.get("External id", args.get("external id")))
        thread = integer(event.get("tid")) or 0
        if external_id is not None:
            events.places[external_id] = float(start), thread
        if "Collective name" in args and external_id is not None:
            events.args[external_id] = float(start), args
        elif "Input Dims" in args and isinstance(duration, int | float) and name != "record_param_comms":
            calls = (events.operators if name in _OPERATORS else events.calls).setdefault(thread, [])
            calls.append((float(start), float(start) + float(duration), name, args))
    elif category in ("cuda_runtime", "cuda_driver") and name.startswith(_LAUNCHES):
        correlation = integer(args.get("correlation"))
        if correlation is not None:
            events.launch_correlation.append(correlation)
            events.launch_us.append(float(start))
            events.launch_thread.append(integer(event.get("tid")) or 0)


def _observations(events: _Events, summary: Summary, file_name: str) -> Iterator[Observation]:
    counters = SequenceNumbers()
    launches = _launches(events)
    for calls in (*events.calls.values(), *events.operators.values()):
        calls.sort(key=lambda call: call[:2])
    used: set[tuple[int, int, bool]] = set()
    kernels = events.kernels or _calls_alone(events, summary)
    is_begun = False
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        args = kernel.args
        if args is None and kernel.external_id in events.args:
            args = events.args[kernel.external_id][1]
        if args is None or ("Group size" not in args and "Out msg nelems" not in args):
            dimensions = _dimensions(kernel, events, launches, used)
            args = dimensions if args is None or dimensions is None else {**dimensions, **args}
        if args is None:
            is_pair = "sendrecv" in kernel.name.lower()  # point to point, or an all-to-all made of it
            unsized = (
                LeftOut.kernel_without_size
                if is_begun or kernel.correlation in launches
                else LeftOut.before_window  # the profiler cut a step at its edge: the other ranks' records count
            )
            summary.skip(LeftOut.point_to_point_or_unknown if is_pair else unsized)
            continue
        is_begun = True
        observation = _observation(kernel, args, events, counters, summary, file_name)
        if observation is not None:
            yield observation


def _calls_alone(events: _Events, summary: Summary) -> list[_Kernel]:
    """Calls in a trace without any kernel, as kernels of unknown duration and channels."""
    if events.args:
        summary.note("the trace has the calls of collectives but not their kernels: their durations are unknown")
    return [_Kernel("", start_us, -1.0, 0, at, -1, args) for at, (start_us, args) in events.args.items()]


def _launches(events: _Events) -> dict[int, tuple[float, int]]:
    """Correlation id -> (time, thread) of the launches of collective kernels without sizes."""
    wanted = {kernel.correlation for kernel in events.kernels if kernel.args is None or "Group size" not in kernel.args}
    return {
        correlation: (launch_us, thread)
        for correlation, launch_us, thread in zip(
            events.launch_correlation, events.launch_us, events.launch_thread, strict=True
        )
        if correlation in wanted
    }


def _dimensions(
    kernel: _Kernel, events: _Events, launches: Mapping[int, tuple[float, int]], used: set[tuple[int, int, bool]]
) -> Mapping[str, Any] | None:
    """Dimensions in old traces: from the call that launched only this kernel, and the operator around it."""
    place = launches.get(kernel.correlation)
    # If Kineto numbered kernels by their correlation, that is no external id.
    if place is None and kernel.external_id != kernel.correlation:
        place = events.places.get(kernel.external_id)
    if place is None:
        return None
    operator, call = (_around(place, calls, used) for calls in (events.operators, events.calls))
    both = None if operator is None else _both_sides(*operator)
    return both if both is not None or call is None else _input_side(*call)


def _around(
    place: tuple[float, int],
    all_calls: Mapping[int, list[tuple[float, float, str, Mapping[str, Any]]]],
    used: set[tuple[int, int, bool]],
) -> tuple[str, Mapping[str, Any]] | None:
    """(name, arguments) of the call that was running, if no other kernel has used it."""
    at_us, thread = place
    calls = all_calls.get(thread, [])
    index = bisect_right(calls, at_us, key=lambda call: call[0]) - 1
    if index < 0 or calls[index][1] < at_us:
        return None
    _, _, name, args = calls[index]
    if (key := (thread, index, name in _OPERATORS)) in used:
        return None
    used.add(key)
    return name, args


def _both_sides(name: str, args: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """An operator's output and input."""
    dims, types = args.get("Input Dims"), args.get("Input type")
    sides = [_n_elements(dim) for dim in dims[:2]] if isinstance(dims, list) else []
    if len(sides) < 2 or not isinstance(types, list) or len(types) < 2 or types[0] != types[1]:
        return None
    n_out, n_in = sides
    if not n_out or not n_in:
        return None
    return {"Collective name": name, "In msg nelems": n_in, "Out msg nelems": n_out, "dtype": types[0]}


def _input_side(name: str, args: Mapping[str, Any]) -> Mapping[str, Any] | None:
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list):
        return None
    sizes = [_n_elements(dim) for dim in dims]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    return {"Collective name": name, "In msg nelems": sum(known), "dtype": types[0] if types else None}


def _n_elements(dim: Any) -> int | None:
    """Elements of one tensor; 0 if it has no dimensions, None if they are invalid."""
    if not isinstance(dim, list) or not all(type(extent) is int and 0 <= extent <= MAX_BYTES for extent in dim):
        return None
    return math.prod(dim) if dim else 0


def _observation(
    kernel: _Kernel,
    args: Mapping[str, Any],
    events: _Events,
    counters: SequenceNumbers,
    summary: Summary,
    file_name: str,
) -> Observation | None:
    name, dtype = args.get("Collective name"), args.get("dtype")
    collective = _collective_of(name) if isinstance(name, str) else None
    if collective is None or collective in POINT_TO_POINT:
        summary.skip(LeftOut.point_to_point_or_unknown)
        return None
    width = _width_of(dtype) if isinstance(dtype, str) else None
    elements = [args.get(f"{side} msg nelems") for side in ("In", "Out")]
    if any(map(is_impossible, elements)):
        summary.skip(LeftOut.impossible_size)
        return None
    group, ranks = str(args.get("Process Group Name", ""))[:400], str(args.get("Process Group Ranks", ""))[:400]
    described = events.groups.get(group, {})
    by_source = {"its call": rank_count(args.get("Group size")), "its list": n_listed(args), **described}
    sides = [side_bytes(n_elements, width) for n_elements in elements]
    message_bytes, n_ranks = sized_call(collective, sides, by_source, summary, file_name)
    if events.world_size and n_ranks > events.world_size:
        summary.note(f"{file_name}: a group has {n_ranks} ranks, but the job is said to have {events.world_size}")
    if not message_bytes:
        summary.skip(LeftOut.bytes_unknown)
        return None
    # Groups without a name are distinguished by their sizes.
    comm_id = _communicator_of(f"{group}\0{ranks}" if group or ranks else f"of {n_ranks}")
    sequence = integer(args.get("Seq"))
    events.is_counted = events.is_counted or sequence is None
    timed = 0 < kernel.duration_us < 1e12
    return Observation(
        sequence=counters.next(comm_id, collective) if sequence is None or sequence < 0 else sequence & UNKNOWN_U4,
        collective=collective,
        message_bytes=message_bytes,
        n_ranks=n_ranks,
        rank=UNKNOWN_U4 if events.rank is None or not 0 <= events.rank < UNKNOWN_U4 else events.rank,
        comm_id=comm_id,
        datatype=dtype if isinstance(dtype, str) else None,
        n_channels=kernel.n_channels or None,
        start_ns=max(0, int(kernel.start_us * 1000) + events.base_ns) & ((1 << 62) - 1),
        duration_us=kernel.duration_us if timed else None,
        timing_source=TimingSource.reported if timed else TimingSource.none,
    )


