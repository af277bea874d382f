"""One rank of `owner_broadcasts`: trains two copies of a model, which gather in two ways, one step each in turn.

Processor time is that of all ranks together.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

import zerotune.agent.nccl.emulated  # noqa: F401  (registers the backend)
from zerotune import zero_runtime
from zerotune.agent.nccl.emulated import journal
from zerotune.agent.nccl.emulated.device import clock
from zerotune.store.records import Collective
from zerotune.zero_runtime.examples.gpt import GPT, GPTShape

WARM_UP = 2
GATHERS = (Collective.all_gather, Collective.broadcast)


def gathered() -> tuple[int, int]:
    """Bytes of whole buffers, and calls, that all gathers and broadcasts had so far."""
    found = [(key[1], n) for key, n in journal().counts.items() if key[0] in GATHERS]
    return sum(n_bytes * n for n_bytes, n in found), sum(n for _, n in found)


def main() -> None:
    backend, n_steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    rows = torch.randint(256, (4, 65))
    steps = {}
    for way in ("all_gather", "broadcast"):
        torch.manual_seed(0)
        model = GPT(GPTShape(n_layers=6, width=256, n_context=64))
        engine = zero_runtime.shard(model, stage=3, gather_by_broadcasts=way == "broadcast")
        steps[way] = (model, engine.optimizer(torch.optim.AdamW, lr=1e-3))
    seen: dict[str, dict[str, list[float]]] = {way: {} for way in steps}
    for n in range(WARM_UP + n_steps):
        for way, (model, optimizer) in steps.items():
            dist.barrier()
            before = (*gathered(), clock.now_us(), time.process_time() * 1e3)
            model(rows[:, :-1], rows[:, 1:]).backward()
            optimizer.step()
            dist.barrier()
            after = (*gathered(), clock.now_us(), time.process_time() * 1e3)
            if n >= WARM_UP:
                for name, a, b in zip(("bytes", "calls", "virtual_us", "cpu_ms"), before, after, strict=True):
                    seen[way].setdefault(name, []).append(b - a)
    for found in seen.values():
        cpu_ms = torch.tensor(found["cpu_ms"], dtype=torch.float64)
        dist.all_reduce(cpu_ms)
        found["cpu_ms"] = cpu_ms.tolist()
    if dist.get_rank() == 0:
        medians = {way: {name: statistics.median(all_) for name, all_ in found.items()} for way, found in seen.items()}
        print(f"figures {json.dumps(medians)}", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


main()
