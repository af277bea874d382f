"""A rank that takes steps and says which of NCCL's variables it has: `python environment_job.py STEPS`."""

import os
import sys

import torch
import torch.distributed as dist

import zerotune

dist.init_process_group()
gathered = torch.zeros(64 * dist.get_world_size())
for _ in range(int(sys.argv[1])):
    dist.all_gather_into_tensor(gathered, torch.ones(64))
    zerotune.step_ended()
print(f"rank {dist.get_rank()} has {os.environ.get('NCCL_NSOCKS_PERTHREAD', 'nothing')}")
dist.destroy_process_group()
