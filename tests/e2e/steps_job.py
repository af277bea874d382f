"""A rank whose steps are one all-gather and a pause, as of a GPU that works: `python steps_job.py STEPS`."""

import sys
import time

import torch
import torch.distributed as dist

import zerotune

PAUSE_S = 0.005

dist.init_process_group()
gathered = torch.zeros(64 * dist.get_world_size())
for _ in range(int(sys.argv[1])):
    dist.all_gather_into_tensor(gathered, torch.ones(64))
    time.sleep(PAUSE_S)
    zerotune.step_ended()
dist.destroy_process_group()
