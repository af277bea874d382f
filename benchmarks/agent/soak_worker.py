"""One rank of `soak_daemon`: runs small collectives and steps."""

from __future__ import annotations

import json
import mmap
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

import zerotune
from zerotune.agent.nccl import emulated

CALLS_PER_STEP = 20
SIZES_BYTES: Final = (4096, 16384, 65536)
"""Of a whole buffer: all three are cheap, and three decision keys."""


def collectives(rank: int, n_ranks: int, n_collectives: int) -> Iterator[int]:
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


def main() -> None:
    n_collectives, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group()
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    progress = folder / f"progress{rank}"
    progress.write_bytes(bytes(8))
    with progress.open("r+b") as file, mmap.mmap(file.fileno(), 8) as told:
        for call in collectives(rank, n_ranks, n_collectives):
            if call % CALLS_PER_STEP == CALLS_PER_STEP - 1:
                zerotune.step_ended()
                told[:] = struct.pack("q", call + 1)
    document = {"n_disagreements": emulated.journal().n_disagreements}
    (folder / f"end{rank}").write_text(json.dumps(document))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
