"""Moves gradients from backward into the shards: buckets, reduce-scatter, accumulation.

When autograd produces a gradient, it is moved into the bucket of its chunk. A full bucket is reduce-scattered
while backward continues, and the sum, times 1/n_ranks, is stored in the shard. Stages 2 and 3 keep a bucket only until
it is reduced. Stage 1 keeps all buckets side by side in one buffer of the model's length, with each sum in the place
of this rank's slice; it needs a separate shard only if a second pass adds to the sums. Sums that the optimizer needs
in another dtype are separate tensors, one per chunk, so that each can be freed as soon as its copy is made.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .. import phases
from ..collectives import Collectives, Work
from ..layout.flat_buffer import Flat
from ..layout.flat_layout import Slot


@dataclass(frozen=True)
class Sum:
    """A reduction's result for one chunk."""

    chunk: int
    reduced: Tensor
    source: Tensor  # kept alive while the collective reads it
    first: bool  # write to the shard instead of adding to it


@dataclass
class PendingReduction:
    """A running reduction of chunks that were sent together."""

    work: Work
    flat: FlatGradients
    sums: tuple[Sum, ...]
    replicated: bool = False


class PendingReductions:
    """Running reductions, at most `limit` at a time, finished in the order of issue."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.queue: deque[PendingReduction] = deque()

    def make_room(self) -> None:
        """Finishes the oldest reductions until one more may run."""
        while len(self.queue) >= self._limit:
            self.complete_oldest()

    def push(self, reduction: PendingReduction) -> None:
        """Adds a reduction; first finishes the oldest if too many are running."""
        self.make_room()
        self.queue.append(reduction)

    def complete_oldest(self) -> None:
        """Waits for the oldest and adds it to its shard."""
        reduction = self.queue.popleft()
        reduction.work.wait()
        reduction.flat.complete(reduction)

    def complete_all(self) -> None:
        """Waits for all."""
        while self.queue:
            self.complete_oldest()


@dataclass(frozen=True)
class ReduceSettings:
    """How gradients are summed.

    dtype: of buckets, of the collective, and of the accumulated shard.
    keep_local: True in stage 1: a buffer of the model's length stays.
    all_reduce: the stage-1 variant of the articles: every rank gets every sum, and uses its own slice.
    prescale: divide gradients as they are moved into buckets, instead of after the sum: for fp16, which could overflow
        in the sum, and if that changes no bit.
    """

    dtype: torch.dtype
    keep_local: bool
    all_reduce: bool
    prescale: bool
    n_replicas: int
    replicate_group: dist.ProcessGroup | None


class FlatGradients:
    """The gradients of one trainable flat buffer."""

    def __init__(
        self, flat: Flat, collectives: Collectives, pending: PendingReductions, settings: ReduceSettings
    ) -> None:
        self.flat = flat
        self.layout = flat.layout
        self._collectives = collectives
        self._pending = pending
        self._settings = settings
        self._scale = 1.0 / (self.layout.n_ranks * settings.n_replicas)
        slots, chunks = self.layout.slots, self.layout.chunks
        self._parts_of = [[self._part(slot, chunk) for chunk in self.layout.chunks_of(slot)] for slot in slots]
        self.slots_of: list[list[int]] = [[] for _ in chunks]
        for index, parts in enumerate(self._parts_of):
            for chunk, _, _ in parts:
                self.slots_of[chunk].append(index)
        self._missing = [len(members) for members in self.slots_of]
        self._arrived: list[set[int]] = [set() for _ in chunks]
        self.buckets: list[Tensor | None] = [None] * len(chunks)  # being filled, by chunk
        self._local: Tensor | None = None  # stage 1: the buffer that buckets are slices of
        self.seen: set[int] = set()  # slots that got a gradient since the gradients were last cleared
        self._shard: Tensor | None = None  # sums that the optimizer uses without a copy, side by side
        self.changed = False  # since the shard was last turned into the optimizer's gradients
        self.is_handed_over = False  # only those gradients have earlier sums
        self._ends = [chunk.shard_start + chunk.shard_numel for chunk in chunks]  # within the shard
        self._is_apart = False  # stage 1: the sums were moved out of the buckets
        self._sums: list[Tensor | None] = [None] * len(chunks)  # by chunk; None: nothing was sent for it yet

    def _part(self, slot: Slot, chunk: int) -> tuple[int, slice, slice | None]:
        """(chunk, range in its bucket, the parameter's elements in that range; None: all)."""
        plan = self.layout.chunks[chunk]
        low, high = max(slot.offset, plan.start), min(slot.end, plan.end)
        is_whole = (low, high) == (slot.offset, slot.end)
        elements = None if is_whole else slice(low - slot.offset, high - slot.offset)
        return chunk, slice(low - plan.start, high - plan.start), elements

    def _bucket(self, chunk: int) -> Tensor:
        bucket = self.buckets[chunk]
        if bucket is None:
            plan = self.layout.chunks[chunk]
            dtype, device = self._settings.dtype, self.flat.device
            if self._settings.keep_local:
                if self._local is None:
                    self._local = torch.empty(self.layout.numel, dtype=dtype, device=device)
                if not self._is_apart and self._sums[chunk] is not None:
                    self._move_sums_apart()
                bucket = self._local[plan.start : plan.end]
            else:
                bucket = torch.empty(plan.numel, dtype=dtype, device=device)
            self.buckets[chunk] = bucket
        return bucket

    def add(self, slot_index: int, gradient: Tensor, final: bool) -> None:
        """Moves one parameter's gradient, which may be sparse, into its buckets.

        `final`: this parameter gets no more gradients before its bucket is summed.
        """
        self.seen.add(slot_index)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        values = gradient.reshape(-1)
        prescale = self._settings.prescale
        for chunk, place, elements in self._parts_of[slot_index]:
            target = self._bucket(chunk)[place]
            part = values if elements is None else values[elements]
            if slot_index in self._arrived[chunk]:
                target.add_(part, alpha=self._scale if prescale else 1)
            elif prescale:
                torch.mul(part, self._scale, out=target)
            else:
                target.copy_(part)
            self._arrived[chunk].add(slot_index)
            if final:
                self._missing[chunk] -= 1

    def is_complete(self, coalesced: Sequence[int]) -> bool:
        """Whether every parameter with elements in the chunks has its gradient."""
        return all(self._missing[chunk] <= 0 for chunk in coalesced)

    def is_pending(self, coalesced: Sequence[int]) -> bool:
        """Whether the chunks have gradients that were not sent yet."""
        return any(self._arrived[chunk] for chunk in coalesced)

    def launch(self, coalesced: Sequence[int]) -> None:
        """Sends one bucket; parameters without a gradient count as zero."""
        self._pending.make_room()  # before more memory is taken
        sums = tuple(map(self._prepared, coalesced))
        self.changed = True
        phases.announce(phases.GRADIENT_SCATTER)
        collectives, group = self._collectives, self.flat.group
        if self._settings.all_reduce:
            work = collectives.together(collectives.all_reduce, [(one.source,) for one in sums], group)
        else:
            pairs = [(one.reduced, one.source) for one in sums]
            work = collectives.together(collectives.reduce_scatter, pairs, group)
        self._pending.push(PendingReduction(work, self, sums))
        for chunk in coalesced:
            self.buckets[chunk] = None
            self._arrived[chunk].clear()
            self._missing[chunk] = len(self.slots_of[chunk])

    def _prepared(self, chunk: int) -> Sum:
        plan, bucket = self.layout.chunks[chunk], self._bucket(chunk)
        self._blank(chunk, bucket)
        first = self._sums[chunk] is None
        if first:
            reduced = self._sums[chunk] = self._room(chunk)
        else:
            reduced = torch.empty(plan.shard_numel, dtype=bucket.dtype, device=bucket.device)
        return Sum(chunk, reduced, bucket, first)

    def _blank(self, chunk: int, bucket: Tensor) -> None:
        plan = self.layout.chunks[chunk]
        empty = [
            (s.offset, s.end)
            for i in self.slots_of[chunk]
            if i not in self._arrived[chunk]
            for s in (self.layout.slots[i],)
        ]
        for start, end in [*empty, *self.layout.gaps]:
            low, high = max(start, plan.start), min(end, plan.end)
            if low < high:
                bucket[low - plan.start : high - plan.start].zero_()

    @torch.no_grad()
    def complete(self, reduction: PendingReduction) -> None:
        """Adds finished sums to the shard; across replicas, first starts their all-reduce."""
        settings, collectives = self._settings, self._collectives
        if settings.all_reduce and not reduction.replicated:
            for one in reduction.sums:
                own = self.flat.rank * one.reduced.numel()
                summed = one.source[own : own + one.reduced.numel()]
                if summed.data_ptr() != one.reduced.data_ptr():
                    one.reduced.copy_(summed)
        if settings.replicate_group is not None and not reduction.replicated:
            phases.announce(phases.GRADIENT_SCATTER)
            summed_here = [(one.reduced,) for one in reduction.sums]
            work = collectives.together(collectives.all_reduce, summed_here, settings.replicate_group)
            self._pending.push(PendingReduction(work, self, reduction.sums, replicated=True))
            return
        scale = 1.0 if settings.prescale else self._scale
        for one in reduction.sums:
            if not one.first:
                self._sum(one.chunk).add_(one.reduced, alpha=scale)
            elif scale != 1.0:
                one.reduced.mul_(scale)

    @property
    def _is_copied(self) -> bool:
        """Whether the optimizer sees copies of the sums, in the master copy's dtype."""
        return self._settings.dtype != self.flat.master_dtype

    def _room(self, chunk: int) -> Tensor:
        """Memory for the chunk's slice of the sum."""
        plan, dtype, device = self.layout.chunks[chunk], self._settings.dtype, self.flat.device
        if self._settings.keep_local and not self._is_apart:
            assert self._local is not None
            return self._local[slice(*self.layout.rank_slice(plan, self.flat.rank))]
        if self._is_copied:
            return torch.empty(plan.shard_numel, dtype=dtype, device=device)
        if self._shard is None:
            self._shard = torch.empty(self.layout.shard_numel, dtype=dtype, device=device)
        return self._shard[plan.shard_start : plan.shard_start + plan.shard_numel]

    def _move_sums_apart(self) -> None:
        """Moves an earlier pass's sums out of buckets, as new gradients are about to overwrite them."""
        self._pending.complete_all()
        self._is_apart = True
        for chunk, values in enumerate(self._sums):
            if values is not None:
                self._sums[chunk] = self._room(chunk).copy_(values)

    def _sum(self, chunk: int) -> Tensor:
        values = self._sums[chunk]
        assert values is not None
        return values

    @property
    def is_ready(self) -> bool:
        """Whether a sum was sent for every chunk of the shard."""
        return all(values is not None for values in self._sums)

    def values(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Elements of this rank's sums, shape (numel,): their memory if possible, otherwise a copy."""
        if self._shard is not None:
            return self._shard[start : start + numel].to(dtype)
        parts = []
        for index in range(bisect_right(self._ends, start), bisect_left(self._ends, start + numel) + 1):
            offset = self.layout.chunks[index].shard_start
            parts.append(self._sum(index)[max(0, start - offset) : start + numel - offset])
        if len(parts) == 1:
            return parts[0].to(dtype)
        joined = torch.empty(numel, dtype=dtype, device=self.flat.device)
        torch._foreach_copy_(list(torch.split(joined, [part.numel() for part in parts])), parts)
        return joined

    @property
    def _go_once_copied(self) -> bool:
        """Whether sums are separate tensors, and useless once the optimizer has copies."""
        return self._is_copied and (self._is_apart or not self._settings.keep_local)

    def release(self, end: int) -> None:
        """The optimizer has the gradients below `end` of the shard; sums that it has copied are freed."""
        if self._go_once_copied:
            n_done = bisect_right(self._ends, end)
            self._sums[:n_done] = [None] * n_done

    def hand_over(self) -> None:
        """The optimizer has all gradients of the pass."""
        self.changed = False
        self.release(self.layout.shard_numel)
        self.is_handed_over = self._go_once_copied

    @property
    def has_unsent(self) -> bool:
        """Whether gradients of this rank were accumulated and not sent."""
        return any(self._arrived)

    def clear(self) -> None:
        """Forgets every gradient, reduced or not; stage 1's buffer stays, other sums make room for activations."""
        self._shard = None
        self._sums = [None] * len(self._sums)
        self.changed = self.is_handed_over = self._is_apart = False
        self.seen.clear()
        for chunk, arrived in enumerate(self._arrived):
            arrived.clear()
            self.buckets[chunk] = None
            self._missing[chunk] = len(self.slots_of[chunk])


class Schedule:
    """The order in which a unit's buckets are sent: last parameters first, and the same on every rank.

    A complete bucket waits for those before it, so that ranks never send different buckets to each other if one rank
    did not use a parameter. With gathers in between (stage 3), gradients that are missing when the next unit is
    reached count as zero. But *late* buckets, whose last gradient comes later, are sent at the end of the pass.
    """

    def __init__(self, gradients: Sequence[FlatGradients], positions: dict[int, int]) -> None:
        self._gradients, self._positions = tuple(gradients), positions
        self._order: list[tuple[FlatGradients, tuple[int, ...]]] = []
        self._late_chunks: set[tuple[FlatGradients, int]] = set()
        self.rebuild()

    def rebuild(self) -> None:
        """Makes buckets of the present coalesced groups of chunks; a bucket with a late chunk is late."""
        order = []
        for g in self._gradients:
            for coalesced in g.flat.coalesced_groups:
                filled = tuple(chunk for chunk in coalesced if g.slots_of[chunk])
                if filled:
                    order.append((self._positions[id(g.flat.parameters[g.slots_of[filled[-1]][-1]])], g, filled))
        self._order = [(g, coalesced) for _, g, coalesced in sorted(order, key=lambda item: -item[0])]
        self._next = 0
        self._late = [any((g, chunk) in self._late_chunks for chunk in coalesced) for g, coalesced in self._order]
        self._came_late = list(self._late)

    @property
    def late(self) -> list[bool]:
        """Which buckets were late in the last pass that was sent."""
        return self._came_late

    @late.setter
    def late(self, flags: Sequence[bool]) -> None:
        self._late = list(flags)
        self._late_chunks = {
            (g, chunk) for (g, coalesced), flag in zip(self._order, flags, strict=True) if flag for chunk in coalesced
        }

    def advance(self) -> None:
        """Sends complete buckets that are next in order."""
        while self._next < len(self._order):
            gradients, coalesced = self._order[self._next]
            if not self._late[self._next]:
                if not gradients.is_complete(coalesced):
                    return
                gradients.launch(coalesced)
            self._next += 1

    def flush_timely(self) -> None:
        """The next unit is reached: sends all buckets that are not late, complete or not."""
        for index, (gradients, coalesced) in enumerate(self._order):
            if self._late[index]:
                self._came_late[index] = not gradients.is_complete(coalesced)
            elif index >= self._next:
                gradients.launch(coalesced)
        self._next = len(self._order)

    def flush(self) -> None:
        """The end of backward: sends the rest, late buckets, and gradients that came after their bucket was sent."""
        for index, (gradients, coalesced) in enumerate(self._order):
            if self._late[index] or index >= self._next:
                gradients.launch(coalesced)
            else:
                self._came_late[index] = gradients.is_pending(coalesced)
                if self._came_late[index]:
                    gradients.launch(coalesced)
        self._next = 0
