"""What M_D is for, from a recorded run: its allocations and frees, replayed into a heap that can be drawn.

The record is real: torch's profiler notes every tensor's memory as it is taken and given back. The heap is a
model: one stretch of memory from which a request gets the first hole that it fits into, as simple allocators do.
Nothing of this runs in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

USED, FREE = "#", "."


@dataclass(frozen=True)
class AllocationEvent:
    """Memory at `address` taken (`n_bytes` > 0) or given back (< 0)."""

    address: int
    n_bytes: int


def record(run: Callable[[], object]) -> list[AllocationEvent]:
    """What `run` does to CPU memory, in order; what it returns stays alive until the end of the record."""
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


class Heap:
    """Memory given out first-fit, without bound; offsets in bytes."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[int, int]] = {}  # address in the record -> start, end here
        self.extent = 0  # the furthest byte ever used: what the heap needed
        self._in_use = self.peak = 0  # bytes in use, now and at most: what it would have needed without holes

    def apply(self, event: AllocationEvent) -> None:
        """Takes or gives back; memory that was taken before the record began is not ours to give."""
        low, high = self._taken.pop(event.address, (0, 0))
        self._in_use -= high - low
        if event.n_bytes < 0:
            return
        start = 0
        for low, high in self.used():
            if low - start >= event.n_bytes:
                break
            start = high
        self._taken[event.address] = (start, start + event.n_bytes)
        self.extent = max(self.extent, start + event.n_bytes)
        self._in_use += event.n_bytes
        self.peak = max(self.peak, self._in_use)

    @property
    def lost(self) -> int:
        """Bytes lost in holes: what the heap needed beyond what was in use at most."""
        return self.extent - self.peak

    def used(self) -> list[tuple[int, int]]:
        """Stretches in use, in order."""
        return sorted(self._taken.values())

    def holes(self) -> list[int]:
        """Lengths of the free stretches below the extent."""
        found, position = [], 0
        for low, high in [*self.used(), (self.extent, self.extent)]:
            if low > position:
                found.append(low - position)
            position = max(position, high)
        return found


def replay(events: Iterable[AllocationEvent]) -> Heap:
    """The heap behind a record."""
    heap = Heap()
    for event in events:
        heap.apply(event)
    return heap


def draw(heap: Heap, n_cells: int = 96) -> str:
    """The heap up to its extent as a row of cells; a cell counts as used if any byte of it is."""
    cells = [FREE] * n_cells
    for low, high in heap.used():
        first, last = low * n_cells // heap.extent, -(-high * n_cells // heap.extent)
        cells[first:last] = [USED] * (last - first)
    return "".join(cells)
