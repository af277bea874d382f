"""As two_layers.py, but what makes collectives faster makes the step slower, as channels do that others need."""

import statistics
import time

import torch
import torch.distributed as dist
import toy
from torch.distributed.fsdp import fully_shard

N_KNOWN = 40
"""Steps whose median says what is usual: trials begin after 14 at the earliest, and do not run in each of the rest."""
FASTER, SLOWER = 0.85, 1.5
"""A step whose gather takes less than this share of the usual time is made to take so many times as long."""

options = toy.parser().parse_args()
dist.init_process_group("nccl")
torch.cuda.set_device(toy.device())
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(2)]).to(toy.device())
for layer in model:
    fully_shard(layer)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
inputs = torch.randn(8, 2048, device=toy.device())
part, whole = (torch.zeros(n << 20, device=toy.device()) for n in (1, dist.get_world_size()))
began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
known_ms: list[float] = []
for _ in range(options.steps):
    began_s = time.monotonic()
    began.record()
    dist.all_gather_into_tensor(whole, part)
    ended.record()
    model(inputs).square().mean().backward()
    torch.cuda.synchronize()
    took_ms = began.elapsed_time(ended)
    if len(known_ms) < N_KNOWN:
        known_ms.append(took_ms)
    elif took_ms < FASTER * statistics.median(known_ms):
        time.sleep((SLOWER - 1) * (time.monotonic() - began_s))
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
