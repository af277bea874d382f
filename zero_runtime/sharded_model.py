"""The protocol of a sharded model for reading, saving and loading it, without importing the engine."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from .collectives import Collectives
from .layout.flat_buffer import Flat
from .optimizer.sharded import ShardedGradients


class ShardedModel(Protocol):
    """A model whose states are sharded over the ranks of `world`."""

    model: nn.Module
    world: dist.ProcessGroup
    flats: list[Flat]
    sharded: ShardedGradients
    collectives: Collectives
    current_optimizer: torch.optim.Optimizer | None
    """None: it is not made yet."""

    def synchronize(self) -> None:
        """Wait until every parameter is up to date."""

    def after_load(self) -> None:
        """Publish master copies that were written from outside."""
