"""FSDP2 whose gathers may run on another communicator, unmodified but for the line that says so."""

import logging

import zerotune

logging.basicConfig(level=logging.INFO)
zerotune.enable(communicator_variants=[{"max_ctas": 1}])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

dist.init_process_group()
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(60):
    model(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
