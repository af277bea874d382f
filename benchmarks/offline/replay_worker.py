"""The training scripts of `replay_speed.py`'s check: `python replay_worker.py KIND N_RANKS N_STEPS MODEL`.

KIND is ddp, fsdp2, zero1, zero2 or zero3; MODEL is JSON: n_layers, width, n_context, bucket_kb. Started without
RANK, it starts its ranks; torchrun would import torch once more than that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys


def start_ranks(n_ranks: int) -> int:
    from benchmarks.lib.free_port import free_port

    common = {
        **os.environ, "WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(n_ranks)
    ]
    return max(rank.wait() for rank in ranks)


def train(kind: str, n_steps: int, *, n_layers: int, width: int, n_context: int, bucket_kb: int | None) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    from zerotune.zero_runtime.examples.gpt import GPT, GPTShape

    torch.set_num_threads(1)
    dist.init_process_group()
    torch.manual_seed(0)
    gpt = GPT(GPTShape(n_layers=n_layers, width=width, n_context=n_context))
    model: nn.Module = gpt
    optimizer: torch.optim.Optimizer
    clip = None
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=(bucket_kb or 1024) / 1024)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    elif kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in gpt.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        from zerotune import zero_runtime

        bucket_bytes = None if bucket_kb is None else bucket_kb << 10
        engine = zero_runtime.shard(model, stage=int(kind[-1]), bucket_bytes=bucket_bytes)
        optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-3)
        clip = engine.clip_grad_norm_
    rows = torch.randint(256, (4, n_context + 1))
    for _ in range(n_steps):
        model(rows[:, :-1], rows[:, 1:]).backward()
        if clip is not None:
            clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(start_ranks(int(sys.argv[2])))
    train(sys.argv[1], int(sys.argv[3]), **json.loads(sys.argv[4]))
