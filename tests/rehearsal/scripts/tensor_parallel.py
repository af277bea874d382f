"""Tensor parallelism in pairs of ranks, FSDP2 across the pairs: each rank is in communicators of both kinds."""

import torch
import torch.distributed as dist
import toy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

options = toy.parser().parse_args()
dist.init_process_group("nccl")
device = toy.device()
mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("shard", "tensor"))
model = toy.model(options).to(device)
for block in model.blocks:
    parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
# One by one: torch's loops over all parameters at once refuse those of several meshes.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
toy.train(model, optimizer, options, dist.get_rank())
dist.destroy_process_group()
