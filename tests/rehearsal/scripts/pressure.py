"""Device memory as NVML and torch count it while it fills up, and what happens when it is full."""

import pynvml
import torch
import torch.distributed as dist
import toy
from torch.distributed.fsdp import fully_shard

options = toy.parser().parse_args()
dist.init_process_group("nccl")
torch.cuda.set_device(toy.device())
model = toy.model(options).to(toy.device())
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
pynvml.nvmlInit()
uuid = f"GPU-{torch.cuda.get_device_properties(toy.device()).uuid}"
handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)


def pressures() -> tuple[float, float]:
    memory, (free, total) = pynvml.nvmlDeviceGetMemoryInfo(handle), torch.cuda.mem_get_info()
    return memory.used / memory.total, 1 - free / total


before = pressures()
held = torch.empty(int(0.9 * torch.cuda.mem_get_info()[1]), dtype=torch.uint8, device=toy.device())
for was, now in zip(before, pressures(), strict=True):
    assert now - was > 0.85, (was, now)
try:
    torch.empty(torch.cuda.mem_get_info()[1], dtype=torch.uint8, device=toy.device())
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("more memory than the GPU has was given out")
toy.train(model, torch.optim.AdamW(model.parameters()), options, dist.get_rank())
del held
dist.destroy_process_group()
