"""One rank of `soak_daemon`: small collectives and steps, as many as it is told, under whatever agent is here."""

from __future__ import annotations

import json
import mmap
import struct
import sys
from pathlib import Path

import torch.distributed as dist

import zerotune
from benchmarks.agent.soak_calls import collectives
from zerotune.agent.nccl import emulated

CALLS_PER_STEP = 20


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
