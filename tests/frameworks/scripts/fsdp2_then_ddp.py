"""Two models one after the other in one job: FSDP2, then DDP."""

import torch
import torch.distributed as dist
import toy
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

options = toy.parser().parse_args()
dist.init_process_group()
device = toy.device()
sharded = toy.model(options).to(device)
for block in sharded.blocks:
    fully_shard(block)
fully_shard(sharded)
replicated = DistributedDataParallel(toy.model(options).to(device), bucket_cap_mb=0.1)
folder = options.losses
for name, model in (("fsdp2", sharded), ("ddp", replicated)):
    options.losses = folder / name
    toy.train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), options, dist.get_rank())
dist.destroy_process_group()
