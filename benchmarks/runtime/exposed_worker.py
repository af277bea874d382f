"""One rank of the overlap measurement: prints the exposed microseconds of a stage-3 step on the virtual clock."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import zerotune.agent.nccl.emulated  # noqa: F401  (registers the backend)
from zerotune import zero_runtime
from zerotune.agent.nccl.emulated.device import clock
from zerotune.zero_runtime.examples.gpt import GPT, GPTShape

torch.set_num_threads(1)
dist.init_process_group("emulated_nccl")
torch.manual_seed(0)
model = GPT(GPTShape(n_layers=6, width=256, n_context=64))
engine = zero_runtime.shard(model, stage=3, prefetch=int(sys.argv[1]))
optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-3)
rows = torch.randint(256, (4, 65))
before = 0.0
for n in range(6):
    if n == 2:
        before = clock.exposed_us()
    model(rows[:, :-1], rows[:, 1:]).backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(f"exposed_us {(clock.exposed_us() - before) / 4}", flush=True)
sys.stdout.flush()
dist.destroy_process_group()
os._exit(0)
