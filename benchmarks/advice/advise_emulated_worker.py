"""One rank: trains a small GPT under each bucket and prefetch depth, and prints microseconds per step.

They are the virtual clock's. Started by advise_emulated with torchrun; arguments: steps to measure, then
`stage:bucket_bytes:prefetch` of each run.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import zerotune.agent.nccl.emulated  # noqa: F401  (registers the backend)
from zerotune import zero_runtime
from zerotune.agent.nccl.emulated.device import clock
from zerotune.zero_runtime.examples.gpt import GPT, GPTShape

WARM_STEPS = 2
"""Not counted: buffers are made in the first, and the order of units is learned."""
SHAPE = GPTShape(n_layers=6, width=256, n_context=64)
"""Small enough for a processor; a layer is 3 MiB, between the smallest and the largest bucket that is tried."""
BATCH = 4


def step_us(stage: int, bucket_bytes: int, prefetch: int, n_steps: int) -> tuple[float, float]:
    """Train under one configuration.

    Args:
        stage: 1 to 3.
        bucket_bytes: C_B.
        prefetch: blocks gathered ahead.
        n_steps: that are measured.

    Returns:
        Mean duration of a step, and how much of it computation waited.
    """
    torch.manual_seed(0)
    engine = zero_runtime.shard(model := GPT(SHAPE), stage=stage, bucket_bytes=bucket_bytes, prefetch=prefetch)
    optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-3)
    rows = torch.randint(256, (BATCH, SHAPE.n_context + 1))
    begin = exposed = 0.0
    for n in range(WARM_STEPS + n_steps):
        if n == WARM_STEPS:
            begin, exposed = clock.now_us(), clock.exposed_us()
        model(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
    return (clock.now_us() - begin) / n_steps, (clock.exposed_us() - exposed) / n_steps


def main() -> None:
    """Run them one after another."""
    torch.set_num_threads(1)
    dist.init_process_group("emulated_nccl")
    n_steps = int(sys.argv[1])
    for words in sys.argv[2:]:
        stage, bucket, prefetch = map(int, words.split(":"))
        total, exposed = step_us(stage, bucket, prefetch, n_steps)
        if dist.get_rank() == 0:
            print(f"step {words} {total} {exposed}", flush=True)
    sys.stdout.flush()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
