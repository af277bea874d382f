"""What soaks run: gathers and scatters of a few sizes in turn, as many as are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import torch.distributed as dist

SIZES_BYTES: Final = (4096, 16384, 65536)
"""Of a whole buffer: all three are cheap, and three decision keys."""


def collectives(rank: int, n_ranks: int, n_collectives: int) -> Iterator[int]:
    """Run collectives in the process group that is there.

    Args:
        rank: of this process.
        n_ranks: of the group.
        n_collectives: how many.

    Yields:
        Number of each from 0, when it has run.
    """
    inputs = [torch.full((bytes_ // 4 // n_ranks,), float(rank)) for bytes_ in SIZES_BYTES]
    outputs = [torch.empty(len(tensor) * n_ranks) for tensor in inputs]
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed them
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    for call in range(n_collectives):
        which = call % len(SIZES_BYTES)
        if call % 2:
            gather(outputs[which], inputs[which])
        else:
            scatter(inputs[which], outputs[which])
            inputs[which].fill_(float(rank))
        yield call
