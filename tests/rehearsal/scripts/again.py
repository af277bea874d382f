"""The process group is destroyed and made again, in one process."""

import torch
import torch.distributed as dist
import toy
from torch.distributed.fsdp import fully_shard

options = toy.parser().parse_args()
for life in range(3):
    dist.init_process_group("nccl")
    torch.cuda.set_device(toy.device())
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (life, dist.get_rank()))
    assert seen == [(life, each) for each in range(dist.get_world_size())], seen
    model = toy.model(options).to(toy.device())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    toy.train(model, torch.optim.AdamW(model.parameters()), options, dist.get_rank())
    dist.destroy_process_group()
