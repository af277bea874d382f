"""The norm of all gradients, which are spread over ranks.

Shards of one group are disjoint, so powers of their norms add up. Model-parallel ranks have parts of some parameters
and equal copies of others. As in Megatron, `parameter.tensor_model_parallel = True` marks parts, and copies count
once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import phases
from ..collectives import Collectives
from .sharded import ShardSlice


def counted(slices: Sequence[ShardSlice], model_parallel_group: dist.ProcessGroup | None) -> list[Tensor]:
    """This rank's gradients, without those that another model-parallel rank counts."""
    found = [
        (shard_slice, shard_slice.parameter.grad) for shard_slice in slices if shard_slice.parameter.grad is not None
    ]
    if model_parallel_group is None or dist.get_rank(model_parallel_group) == 0:
        return [gradient for _, gradient in found]
    return [
        gradient[piece.shard_offset - shard_slice.start :][: piece.numel]
        for shard_slice, gradient in found
        for piece in shard_slice.pieces
        if getattr(shard_slice.flat.parameters[piece.slot], "tensor_model_parallel", False)
    ]


def global_norm(
    parts: Sequence[Tensor],
    norm_type: float,
    collectives: Collectives,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> Tensor:
    """The norm of all gradients, equal on all ranks, by one collective of one number for each of `groups`.

    Args:
        parts: this rank's gradients, of any shape, each element on one rank only; see `counted`.
        norm_type: p of the p-norm; infinity is the largest magnitude.
        groups: groups of ranks with other parts: the data-parallel one, and the model-parallel one if there is one.
        device: the result's device if this rank has no gradients.
    """
    norms = [torch.linalg.vector_norm(part, norm_type) for part in parts if part.numel()]
    own = torch.stack(norms) if norms else torch.zeros(1, device=device)
    if norm_type == float("inf"):
        total = own.max()
        for group in groups:
            everyone = [torch.zeros_like(total) for _ in range(dist.get_world_size(group))]
            phases.announce(phases.OTHER)
            dist.all_gather(everyone, total, group=group)  # the backend's maximum might lose NaN
            total = torch.stack(everyone).max()
        return total
    powers = (own**norm_type).sum()
    for group in groups:
        phases.announce(phases.OTHER)
        collectives.all_reduce(powers, group).wait()
    return powers ** (1.0 / norm_type)
