"""One rank: trains a small GPT under each bucket and prefetch depth, and prints microseconds per step.

They are the virtual clock's. Started by advise_emulated with torchrun; arguments: steps to measure, then
`stage:bucket_bytes:prefetch` of each run, with `:autotune` behind it where the runtime is to find better ones first.
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
MOST_STEPS = 800
"""For the runtime to be done with its search."""


def step_us(stage: int, bucket_bytes: int, prefetch: int, n_steps: int, *, autotune: bool) -> tuple[float, float, int]:
    """Train under one configuration.

    Args:
        stage: 1 to 3.
        bucket_bytes: C_B.
        prefetch: blocks gathered ahead.
        n_steps: that are measured.
        autotune: the runtime begins with these, and is measured when it has found its own.

    Returns:
        Mean duration of a step, how much of it computation waited, and how many steps were not measured.
    """
    torch.manual_seed(0)
    engine = zero_runtime.shard(
        model := GPT(SHAPE), stage=stage, bucket_bytes=bucket_bytes, prefetch=prefetch, autotune=autotune
    )
    optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-3)
    rows = torch.randint(256, (BATCH, SHAPE.n_context + 1))

    def step() -> None:
        model(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()

    n_before = 0
    while n_before < WARM_STEPS or (autotune and engine.best_step_settings is None and n_before < MOST_STEPS):
        step()
        n_before += 1
    begin, exposed = clock.now_us(), clock.exposed_us()
    for _ in range(n_steps):
        step()
    if autotune and dist.get_rank() == 0:
        print(f"found {engine.best_step_settings} after {n_before} steps", flush=True)
    return (clock.now_us() - begin) / n_steps, (clock.exposed_us() - exposed) / n_steps, n_before


def main() -> None:
    """Run them one after another."""
    torch.set_num_threads(1)
    dist.init_process_group("emulated_nccl")
    n_steps = int(sys.argv[1])
    for words in sys.argv[2:]:
        stage, bucket, prefetch, *autotune = words.split(":")
        total, exposed, n = step_us(int(stage), int(bucket), int(prefetch), n_steps, autotune=bool(autotune))
        if dist.get_rank() == 0:
            print(f"step {words} {total} {exposed} {n}", flush=True)
    sys.stdout.flush()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
