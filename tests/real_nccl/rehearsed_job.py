"""A small data-parallel training: rank 0 prints what ran, as (collective, bytes, setting, median microseconds)."""

import json
import statistics
from collections import defaultdict

import torch
import torch.distributed as dist

from zerotune.agent.nccl.emulated.journal import journal

WIDTH = 512
"""Its gradients, 512 x 512 float32, are 1 MiB."""

dist.init_process_group("nccl")
journal().keep_calls = True
model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
for _ in range(9):
    model(torch.ones(4, WIDTH)).sum().backward()
    dist.all_reduce(model.weight.grad)  # DDP would do it, after seconds of imports
    with torch.no_grad():
        model.weight -= 0.1 * model.weight.grad
        model.weight.grad = None
    dist.all_gather_into_tensor(torch.empty(1 << 18), torch.ones(1 << 17))
dist.barrier()
if dist.get_rank() == 0:
    times = defaultdict(list)
    for call in journal().calls:
        setting = (call.candidate.algorithm.name, call.candidate.protocol.name, call.candidate.n_channels)
        times[call.collective.name, call.message_bytes, setting].append(call.end_us - call.start_us)
    print(json.dumps([[*key, statistics.median(each)] for key, each in times.items()]), flush=True)
dist.destroy_process_group()
