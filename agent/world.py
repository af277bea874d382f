"""A snapshot of the default process group, which the script may destroy at any moment."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import distributed_c10d


def current_group() -> dist.ProcessGroup | None:
    """The default process group; None if there is none. Cheap enough for every step."""
    return distributed_c10d._world.default_pg


@dataclass(frozen=True)
class World:
    """One default process group."""

    group: dist.ProcessGroup
    store: dist.Store
    """On the script's own connection."""
    rank: int
    n_ranks: int
    backend: str
    backends: str
    """The backend of each device."""

    @classmethod
    def now(cls) -> World:
        """The current default group; raises `ValueError` if there is none."""
        group = distributed_c10d._get_default_group()
        return cls(
            group,
            distributed_c10d._get_default_store(),
            dist.get_rank(),
            dist.get_world_size(),
            dist.get_backend(),
            dist.get_backend_config(),
        )

    def has_ended(self) -> bool:
        """Whether the script has destroyed or replaced it."""
        return current_group() is not self.group
