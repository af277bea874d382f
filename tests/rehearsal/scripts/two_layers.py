"""FSDP2 with few kernels and large collectives, so that these are much of a step even on a slow host."""

import torch
import torch.distributed as dist
import toy
from torch.distributed.fsdp import fully_shard

options = toy.parser().parse_args()
dist.init_process_group("nccl")
torch.cuda.set_device(toy.device())
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(2)]).to(toy.device())
for layer in model:
    fully_shard(layer)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
inputs = torch.randn(8, 2048, device=toy.device())
for _ in range(options.steps):
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
dist.destroy_process_group()
