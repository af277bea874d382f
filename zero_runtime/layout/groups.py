"""Divides a world into groups: ranks that share one copy of the states, and ranks with the same shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ..errors import SettingsError


def hybrid_groups(
    world: dist.ProcessGroup, n_ranks_per_shard: int | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """This rank's groups: (ranks that share one copy of the states, ranks with the same shard).

    Raises:
        SettingsError: the world is not a multiple of `n_ranks_per_shard`.
    """
    ranks = dist.get_process_group_ranks(world)
    width = n_ranks_per_shard or len(ranks)
    if len(ranks) % width:
        raise SettingsError(
            f"{len(ranks)} ranks cannot be cut into shard groups of {width}; choose a divisor of {len(ranks)}"
        )
    if width == len(ranks):
        return world, None
    own = ranks.index(dist.get_rank())
    rows = [ranks[start : start + width] for start in range(0, len(ranks), width)]
    columns = [ranks[start::width] for start in range(width)]
    shard_group, replicate_group = (
        next(group for line, group in zip(lines, _new_groups(lines, world), strict=True) if ranks[own] in line)
        for lines in (rows, columns)
    )
    return shard_group, replicate_group


def _new_groups(lines: Sequence[Sequence[int]], world: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """One group per line of ranks. If not the whole world calls, only members of a line make its group."""
    everyone = len(dist.get_process_group_ranks(world)) == dist.get_world_size()
    own = dist.get_rank()
    return [
        dist.new_group(list(line), use_local_synchronization=not everyone) if everyone or own in line else world
        for line in lines
    ]
