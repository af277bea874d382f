"""The tensors behind one flat buffer: whole parameters, this rank's shard, its fp32 master copy.

What a rank keeps at rest, in the words of the ZeRO paper (Ψ elements, N_d ranks):

                        whole (2Ψ)      shard           master, momentum, variance (KΨ/N_d)
    stages 1 and 2      kept            part of whole   this rank's slices
    stage 3             only while used part of whole   this rank's slices

Without mixed precision the shard is its own master, and stage 3 keeps the shard without a second copy. With mixed
precision stage 3 keeps only the master, and rounds it into its place in the whole right before the gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import phases
from ..collectives import Collectives, Work
from .flat_layout import Layout, plan_layout
from .sharded_placeholder import make_placeholder, make_plain


@dataclass(frozen=True)
class Managed:
    """A parameter of the model and every place that holds it (several when tied)."""

    name: str
    parameter: nn.Parameter
    holders: tuple[tuple[nn.Module, str], ...]


class Flat:
    """Parameters of one dtype, all trainable or all frozen, in one flat buffer.

    Args:
        managed: in the model's order.
        partitioned: True in stage 3: whole parameters exist only between `gather` and `free`.
        max_chunk_bytes: C_B, the most bytes that one collective moves.
    """

    def __init__(
        self,
        managed: Sequence[Managed],
        group: dist.ProcessGroup,
        collectives: Collectives,
        compute_dtype: torch.dtype,
        partitioned: bool,
        max_chunk_bytes: int,
    ) -> None:
        self.managed = tuple(managed)
        self.parameters = tuple(m.parameter for m in managed)
        self.group = self.gather_group = group
        """`gather_group` may become another group of the same ranks."""
        self.rank = dist.get_rank(group)
        self.partitioned = partitioned
        self.trainable = self.parameters[0].requires_grad
        self.compute_dtype = compute_dtype
        self.master_dtype = compute_dtype
        if self.trainable:
            self.master_dtype = self.parameters[0].dtype if compute_dtype.itemsize >= 4 else torch.float32
        self.device = self.parameters[0].device
        self._collectives = collectives
        self.layout: Layout = plan_layout(
            [(m.name, tuple(m.parameter.shape)) for m in managed],
            dist.get_world_size(group),
            max_chunk_bytes // compute_dtype.itemsize,
        )
        self.coalesce(max_chunk_bytes)
        self._first: frozenset[int] = frozenset()
        layout = self.layout
        self.whole = torch.empty(layout.numel, dtype=compute_dtype, device=self.device)
        self._views = [self.whole[s.offset : s.end].view(s.shape) for s in layout.slots]
        # At rest a stage-3 parameter keeps its shape and dtype and takes one element of memory. It refuses reads and
        # writes; if a read cannot be refused, it gives NaN, if the dtype has NaN.
        value = float("nan") if compute_dtype.is_floating_point or compute_dtype.is_complex else 0
        nothing = torch.full((), value, dtype=compute_dtype, device=self.device)
        self._placeholders = [nothing.expand(s.shape) for s in layout.slots]
        self.shown: Sequence[Tensor] = ()  # each parameter's present data
        self._is_kept = False
        self._works: dict[int, tuple[Work, range]] = {}  # by chunk: the work, with all chunks that it gathers
        self.has_master = compute_dtype != self.master_dtype
        if partitioned and not self.has_master:
            self.slices = self._beside_whole(compute_dtype)
        else:
            self.slices = [self.whole[slice(*layout.rank_slice(chunk, self.rank))] for chunk in layout.chunks]
        self.masters = self._beside_whole(self.master_dtype) if self.has_master else self.slices

    def _beside_whole(self, dtype: torch.dtype) -> list[Tensor]:
        """Separate memory for this rank's slices, one behind another."""
        shard = torch.empty(self.layout.shard_numel, dtype=dtype, device=self.device)
        return [shard[c.shard_start : c.shard_start + c.shard_numel] for c in self.layout.chunks]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the largest chunk."""
        return self.layout.chunks[0].numel * self.compute_dtype.itemsize if self.layout.chunks else 0

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole parameters, padding included."""
        return self.layout.numel * self.compute_dtype.itemsize

    def coalesce(self, bucket_bytes: int) -> None:
        """Sends neighbouring chunks together, up to `bucket_bytes`, but at least one."""
        indices = range(len(self.layout.chunks))
        n_together = max(1, bucket_bytes // max(1, self.chunk_bytes))
        self.coalesced_groups = [indices[start : start + n_together] for start in range(0, len(indices), n_together)]

    def gather_first(self, chunks: Sequence[int]) -> None:
        """Gathers these chunks before the others from now on, as everything waits for them."""
        self._first = frozenset(chunks)

    @torch.no_grad()
    def adopt(self, broadcast_group: dist.ProcessGroup | None) -> None:
        """Copies the model's values chunk by chunk; if a group is given, those of rank 0."""
        for index, chunk in enumerate(self.layout.chunks):
            stage = torch.zeros(chunk.numel, dtype=self.parameters[0].dtype, device=self.device)
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
                low, high = max(slot.offset, chunk.start), min(slot.end, chunk.end)
                if low < high:
                    source = parameter.detach().reshape(-1)[low - slot.offset : high - slot.offset]
                    stage[low - chunk.start : high - chunk.start].copy_(source)
            if broadcast_group is not None:
                phases.announce(phases.OTHER)
                dist.broadcast(stage, group=broadcast_group, group_src=0)
            own = self.rank * chunk.shard_numel
            mine = stage[own : own + chunk.shard_numel]
            if not self.partitioned:
                self.whole[chunk.start : chunk.end].copy_(stage)
            self.slices[index].copy_(mine)
            if self.has_master:
                self.masters[index].copy_(mine)
        if self.partitioned:
            self.whole.untyped_storage().resize_(0)
        self._point(self._placeholders if self.partitioned else self._views)

    def _point(self, values: Sequence[Tensor]) -> None:
        self.shown = values
        for managed, value in zip(self.managed, values, strict=True):
            make_plain(managed.parameter)
            managed.parameter.data = value
            if values is self._placeholders:
                make_placeholder(managed.parameter, managed.name)

    def start_gather(self, phase: str) -> None:
        """Begins to fill the whole buffer from every rank's slices."""
        storage = self.whole.untyped_storage()
        if storage.nbytes() < self.whole_bytes:
            storage.resize_(self.whole_bytes)
        if self.partitioned:
            self._round_master()
        chunks = self.layout.chunks
        # Works with one of the first chunks come first.
        for coalesced in sorted(self.coalesced_groups, key=self._first.isdisjoint):
            phases.announce(phase)
            pairs = [(self.whole[chunks[i].start : chunks[i].end], self.slices[i]) for i in coalesced]
            work = self._collectives.together(self._collectives.all_gather, pairs, self.gather_group)
            self._works.update(dict.fromkeys(coalesced, (work, coalesced)))

    def finish_gather(self, chunks: Sequence[int] | None = None) -> None:
        """Waits until the given chunks are whole; in stage 3 the parameters then have their values."""
        if self._works:
            for index in tuple(self._works) if chunks is None else chunks:
                if index in self._works:
                    work, coalesced = self._works[index]
                    work.wait()
                    for gathered in coalesced:  # gloo's work must be waited for only once
                        self._works.pop(gathered, None)
        if self.partitioned:
            self._point(self._views)

    def free(self) -> None:
        """Drops the whole parameters; the next gather refills views that autograd saved."""
        if not self._is_kept:
            self._point(self._placeholders)
            self.whole.untyped_storage().resize_(0)

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a whole parameter or a view of one."""
        start = self.whole.data_ptr()
        return tensor.layout is torch.strided and start <= tensor.data_ptr() < start + self.whole_bytes

    def keep(self) -> None:
        """From now on `free` leaves the whole parameters in memory, since something outside refers to it.

        Gathers continue, as other ranks may not know: they write the same values, and new ones after
        a step.
        """
        self._is_kept = True

    def publish_master(self) -> None:
        """Rounds the updated master copy into the next gather's buffer; stage 3 does that right before the gather."""
        if not self.partitioned:
            self._round_master()
        elif self._is_kept:
            self._point(self._placeholders)  # so that old values cannot be read

    @torch.no_grad()
    def _round_master(self) -> None:
        if self.has_master and self.slices:
            torch._foreach_copy_(self.slices, self.masters)
