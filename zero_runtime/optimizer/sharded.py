"""torch's own optimizers on flat shards: a genuine `torch.optim` object whose parameters are this rank's slices.

The optimizer's hooks do the rest: before a step the reductions complete and become `.grad`; after it the
gradients are dropped and the updated slices are published. So schedulers, param groups, `fused=True` and the
optimizer's own state dict work as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import phases
from ..checks import refusal
from ..collectives import Collectives
from ..errors import SettingsError
from ..layout.flat_buffer import Flat
from ..layout.flat_layout import Piece
from ..stages.gradients import FlatGradients, PendingReductions

# Their update of an element depends on other elements of the same tensor, which a shard lacks.
NOT_ELEMENTWISE = {"LBFGS", "Adafactor", "Muon", "SparseAdam"}
SLICE_NUMEL = 1 << 17
"""A slice with this many elements gets no more parameters: optimizers make temporaries of its size, and pass over it
many times, which is faster if it stays in a core's cache."""


@dataclass(frozen=True)
class ShardSlice:
    """Neighbouring elements of a shard that are one parameter of the optimizer.

    parameter: shares the master copy's memory. pieces: the model's parameters in it, in order; padding
    between and behind them is zero and stays so.
    """

    gradients: FlatGradients
    start: int  # first element within the shard
    parameter: nn.Parameter
    pieces: tuple[Piece, ...]

    @property
    def flat(self) -> Flat:
        """The slice's flat buffer."""
        return self.gradients.flat


def plan_slices(
    gradients: FlatGradients, group_of: Callable[[int], int], by_piece: bool
) -> dict[int, list[ShardSlice]]:
    """Cuts a shard into few slices, each of one param group.

    Args:
        group_of: index of the param group by index of the slot.
        by_piece: cut one slice per parameter, so that the optimizer can skip unused ones.

    Returns:
        Slices by index of the param group, in the shard's order; groups without elements on this rank are missing.
    """
    flat = gradients.flat
    pieces = flat.layout.pieces(flat.rank)
    starts: list[tuple[int, list[Piece]]] = []
    for piece in pieces:
        last = starts[-1][1][-1] if starts else None
        new = last is None or by_piece or group_of(last.slot) != group_of(piece.slot)
        new = new or piece.shard_offset - starts[-1][0] >= SLICE_NUMEL
        if not new and last is not None:
            new = _address(flat, piece.shard_offset) != _address(flat, last.shard_offset) + (
                piece.shard_offset - last.shard_offset
            )
        if new:
            starts.append((piece.shard_offset, []))
        starts[-1][1].append(piece)
    slices: dict[int, list[ShardSlice]] = {}
    for start, members in starts:
        numel = members[-1].shard_offset + members[-1].numel - start
        values = torch.empty(0, dtype=flat.master_dtype, device=flat.device)
        storage = flat.masters[0].untyped_storage()
        values.set_(storage, _address(flat, start), (numel,))  # type: ignore[call-overload]
        shard_slice = ShardSlice(gradients, start, nn.Parameter(values), tuple(members))
        slices.setdefault(group_of(members[0].slot), []).append(shard_slice)
    return slices


def _address(flat: Flat, shard_offset: int) -> int:
    """Offset of a shard's element within the masters' storage."""
    for chunk, master in zip(flat.layout.chunks, flat.masters, strict=True):
        if shard_offset < chunk.shard_start + chunk.shard_numel:
            return int(master.storage_offset()) + shard_offset - chunk.shard_start
    raise AssertionError("an offset beyond the shard")


class ShardedGradients:
    """Turns reduced shards into `.grad` of the optimizer's parameters, and clears them."""

    def __init__(
        self,
        gradients: Sequence[FlatGradients],
        pending: PendingReductions,
        collectives: Collectives,
        find_unused: bool,
    ) -> None:
        self._gradients = tuple(gradients)
        self._pending = pending
        self._collectives = collectives
        self._find_unused = find_unused
        self.slices: list[ShardSlice] = []

    def finish(self) -> list[Tensor]:
        """Waits for all reductions and returns the gradients, in the master copy's dtype."""
        self._pending.complete_all()
        changed = [gradients for gradients in self._gradients if gradients.changed]
        if changed:
            unused = self._unused() if self._find_unused else set()
            slices: dict[int, list[ShardSlice]] = {id(gradients): [] for gradients in changed}
            for shard_slice in self.slices:
                if shard_slice.gradients.changed:
                    slices[id(shard_slice.gradients)].append(shard_slice)
            for gradients in changed:
                is_ready = gradients.is_ready
                for shard_slice in sorted(slices[id(gradients)], key=lambda one: one.start):
                    gradients.release(shard_slice.start)  # the optimizer has copies, so the sums can be freed
                    self._lend(shard_slice, is_ready, unused)
                gradients.hand_over()
        return [shard_slice.parameter.grad for shard_slice in self.slices if shard_slice.parameter.grad is not None]

    @staticmethod
    def _lend(shard_slice: ShardSlice, is_ready: bool, unused: set[tuple[int, int]]) -> None:
        """Lends the optimizer one slice's gradient."""
        gradients, parameter = shard_slice.gradients, shard_slice.parameter
        if not is_ready or (id(gradients), shard_slice.pieces[0].slot) in unused:
            parameter.grad = None
            return
        values = gradients.values(shard_slice.start, parameter.numel(), parameter.dtype)
        if gradients.is_handed_over and parameter.grad is not None:
            parameter.grad.add_(values)
        else:
            parameter.grad = values

    def _unused(self) -> set[tuple[int, int]]:
        """(gradients, slot) of parameters without a gradient on any rank."""
        keys = [(id(g), slot) for g in self._gradients for slot in range(len(g.layout.slots))]
        seen = {(id(g), slot) for g in self._gradients for slot in g.seen}
        first = self._gradients[0].flat
        counts = torch.tensor([key in seen for key in keys], dtype=torch.int32, device=first.device)
        phases.announce(phases.OTHER)
        self._collectives.all_reduce(counts, first.group).wait()
        return {key for key, count in zip(keys, counts.tolist(), strict=True) if count == 0}

    def clear(self) -> None:
        """Drops every gradient."""
        self._pending.complete_all()
        for shard_slice in self.slices:
            shard_slice.parameter.grad = None
        for gradients in self._gradients:
            gradients.clear()


def build_optimizer(
    cls: type[torch.optim.Optimizer],
    sharded: ShardedGradients,
    gradients: Sequence[FlatGradients],
    groups: Sequence[Mapping[str, Any]] | None,
    find_unused: bool,
    defaults: dict[str, Any],
) -> torch.optim.Optimizer:
    """A `cls` whose parameters are this rank's slices, to which `sharded` lends their gradients.

    Args:
        groups: torch's param groups over the model's parameters; None: all in one group.
        find_unused: skip parameters without a gradient in a step, as torch does; each parameter gets its own slice.

    Raises:
        SettingsError: `cls` is no optimizer or needs whole tensors, or the groups are no partition of the parameters.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise refusal("cls", cls, "a class such as torch.optim.AdamW; its arguments, such as lr=3e-4, come after it")
    if cls.__name__ in NOT_ELEMENTWISE:
        raise SettingsError(
            f"torch.optim.{cls.__name__} needs whole tensors and cannot run on shards; use an element-wise "
            "optimizer such as Adam, AdamW, SGD or RMSprop"
        )
    options: list[dict[str, Any]] = [{}]
    member: dict[int, int] = {}
    if groups is not None:
        groups = list(groups)
        for group in groups:
            if not isinstance(group, Mapping) or "params" not in group:
                raise refusal("a param group", group, 'a dict such as {"params": [...], "lr": 3e-4}')
        options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                if member.setdefault(id(parameter), index) != index:
                    raise SettingsError("a parameter is in two param groups; list each parameter once")
        for g in gradients:
            for managed in g.flat.managed:
                if id(managed.parameter) not in member:
                    raise SettingsError(f"parameter {managed.name} is in no param group; list it in one")
    lists: list[list[ShardSlice]] = [[] for _ in options]
    for g in gradients:
        ids = [id(p) for p in g.flat.parameters]
        planned = plan_slices(g, lambda slot, ids=ids: member.get(ids[slot], 0), find_unused)  # type: ignore[misc]
        for index, slices in planned.items():
            lists[index] += slices
    sharded.slices = [shard_slice for slices in lists for shard_slice in slices]
    param_groups = [
        {**option, "params": [shard_slice.parameter for shard_slice in slices]}
        for option, slices in zip(options, lists, strict=True)
    ]
    return cls(param_groups, **defaults)
