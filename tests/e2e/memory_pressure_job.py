"""Small messages, then larger ones, on a device that is nearly full.

torchrun ... memory_pressure_job.py SMALL_BYTES LARGE_BYTES SMALL_STEPS LARGE_STEPS PAUSE_S

Rank 0 prints the median step with large messages, in virtual microseconds.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from zerotune.agent.nccl.emulated.device import clock

small_bytes, large_bytes, n_small, n_large = map(int, sys.argv[1:5])
pause_s = float(sys.argv[5])
"""After each step with small messages: the daemon lives in real time, the steps in virtual time."""
COMPUTE_US = 2000.0
CALLS_PER_STEP = 4

torch.set_num_threads(1)
dist.init_process_group("gloo")  # which `zerotune launch --fabric` makes an emulated one
weight = torch.nn.Parameter(torch.zeros(8))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.grad = torch.ones(8)


def run(n_bytes: int, n_steps: int, pause_s: float) -> list[float]:
    """Train with messages of one size.

    Args:
        n_bytes: of each message.
        n_steps: to train.
        pause_s: real time after each step, for the daemon.

    Returns:
        Virtual microseconds of each step.
    """
    message, durations = torch.ones(n_bytes // 4), []
    for _ in range(n_steps):
        before_us = clock.now_us()
        clock.mark_compute_us(COMPUTE_US)
        for _ in range(CALLS_PER_STEP):
            dist.all_reduce(message)
        optimizer.step()
        durations.append(clock.now_us() - before_us)
        time.sleep(pause_s)
    return durations


run(small_bytes, n_small, pause_s)
durations = sorted(run(large_bytes, n_large, 0.0)[1:])
if dist.get_rank() == 0:
    print(f"step_us {durations[len(durations) // 2]}", flush=True)
dist.destroy_process_group()
