"""What reading, saving and loading a sharded model needs of it: what an engine offers, without importing one."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from .collectives import Collectives
from .layout.flat_buffer import Flat
from .optimizer.sharded import ShardedGradients


class ShardedModel(Protocol):
    """A model whose states are spread over the ranks of `world`."""

    model: nn.Module
    world: dist.ProcessGroup
    flats: list[Flat]
    sharded: ShardedGradients
    collectives: Collectives
    current_optimizer: torch.optim.Optimizer | None
    """The optimizer on the shards; None = none was made yet."""

    def synchronize(self) -> None:
        """Wait until every parameter is up to date."""

    def after_load(self) -> None:
        """Share master copies that were written from outside."""
