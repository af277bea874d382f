"""P_a: activation checkpoints partitioned among model-parallel ranks, and P_a+cpu: moved to CPU memory.

Tensor parallelism replicates a block's input on all its ranks. Checkpointing keeps only that input. So each
rank keeps 1/n of it, and one all-gather per block restores it right before the block is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .. import collectives, phases


class PartitionedActivations:
    """Checkpoints blocks and keeps their inputs in shares; `offload` keeps them in CPU memory (P_a+cpu).

    The model-parallel ranks of `group` must have equal inputs of a block.
    """

    def __init__(self, group: dist.ProcessGroup, offload: bool = False) -> None:
        self._group = group
        self._offload = offload
        self._collectives = collectives.for_group(group)
        self._rank = dist.get_rank(group)
        self._n_ranks = dist.get_world_size(group)
        self.kept_bytes = 0
        self.n_gathers = 0

    def __call__(self, block: Callable[..., Any], *args: Any) -> Any:
        """`block(*args)`, computed again in backward from its partitioned inputs."""
        with saved_tensors_hooks(self._partition, self._restore):
            return checkpoint(block, *args, use_reentrant=False)

    def _partition(self, value: Tensor) -> tuple[Tensor, torch.Size, torch.device] | Tensor:
        if not value.is_floating_point() or value.numel() == 0:
            return value
        flat = value.detach().reshape(-1)
        share = -(-flat.numel() // self._n_ranks)
        start = min(self._rank * share, flat.numel())
        part = flat.new_zeros(share)
        own = flat[start : start + share]
        part[: own.numel()].copy_(own)
        self.kept_bytes += share * value.element_size()
        if self._offload:
            part = part.to("cpu", non_blocking=True)
        return part, value.shape, value.device

    def _restore(self, packed: tuple[Tensor, torch.Size, torch.device] | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        part, shape, device = packed
        part = part.to(device)
        whole = part.new_empty(part.numel() * self._n_ranks)
        self.n_gathers += 1
        phases.announce(phases.OTHER)
        self._collectives.all_gather(whole, part, self._group).wait()
        return whole[: shape.numel()].view(shape)
