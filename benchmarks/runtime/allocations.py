"""Every tensor's memory in torch's profiler: when it is taken and when it is given back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AllocationEvent:
    """Memory at `address` taken (`n_bytes` > 0) or given back (< 0)."""

    address: int
    n_bytes: int


def record(run: Callable[[], object]) -> list[AllocationEvent]:
    """Changes of CPU memory by `run`, in order; its result stays alive until the end of the record."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    results: Any = profiler.profiler
    notes = [
        (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
        for event in _descend(results.kineto_results.experimental_event_tree())
        if event.tag.name == "Allocation"
    ]
    del kept
    return [AllocationEvent(address, n_bytes) for _, address, n_bytes in sorted(notes)]


def _descend(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _descend(event.children)


def peak_bytes(events: Iterable[AllocationEvent]) -> int:
    """Most bytes in use at a time; memory that was taken before the record began does not count."""
    taken: dict[int, int] = {}
    in_use = peak = 0
    for event in events:
        in_use -= taken.pop(event.address, 0)
        if event.n_bytes > 0:
            taken[event.address] = event.n_bytes
            in_use += event.n_bytes
            peak = max(peak, in_use)
    return peak
