"""One rank of a job in `chaos.py`: trains until a file asks it to stop, and logs each step's loss and wall time."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerotune import zero_runtime
from zerotune.zero_runtime.examples.gpt import GPT, GPTShape

N_STEPS_AT_MOST = 1_000_000


def sharded(runtime: str, model: Any) -> tuple[Any, Any]:
    """Model and optimizer under FSDP2, or under our own runtime."""
    if runtime == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = zero_runtime.shard(model, stage=3)
    return model, engine.optimizer(torch.optim.AdamW, lr=1e-3)


def main() -> None:
    runtime, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group()
    torch.manual_seed(0)
    shape = GPTShape(n_layers=2, width=32)
    model, optimizer = sharded(runtime, GPT(shape))
    draw = torch.Generator().manual_seed(dist.get_rank())
    is_first = dist.get_rank() == 0
    with open(folder / f"{os.getpid()}.jsonl" if is_first else os.devnull, "w", buffering=1) as log:
        began = time.perf_counter()
        for _ in range(N_STEPS_AT_MOST):
            tokens = torch.randint(255, (1, shape.n_context + 1), generator=draw)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told = torch.tensor([loss.item(), float(is_first and (folder / "stop").exists())])
            dist.all_reduce(told)
            now = time.perf_counter()
            print(json.dumps({"loss": float(told[0]).hex(), "wall_ms": 1e3 * (now - began)}), file=log)
            began = now
            if told[1]:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
