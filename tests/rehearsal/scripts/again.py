"""The process group is destroyed and made again, in one process."""

import os

import torch
import torch.distributed as dist
import toy
from torch.distributed.fsdp import fully_shard

rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
options = toy.parser().parse_args()
for life in range(3):
    # A store of its own: in torchrun's, a rank may find what rank 0 left there in the life before.
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]) + 1 + life, n_ranks, rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=n_ranks)
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
