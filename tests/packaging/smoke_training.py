"""A training job for `smoke.py`: ddp, fsdp2 or zero3, our own. The last turns the agent on itself, without `launch`."""

import sys

import torch
import torch.distributed as dist

import zerotune
from zerotune import zero_runtime

(kind,) = sys.argv[1:]
if kind == "zero3":
    zerotune.enable(fabric="ethernet_boxes")
dist.init_process_group("nccl")
torch.manual_seed(1)
model = torch.nn.Sequential(*(torch.nn.Linear(*widths) for widths in ((128, 512), (512, 128), (128, 128))))
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
elif kind == "fsdp2":
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
if kind == "zero3":
    optimizer = zero_runtime.shard(model, stage=3).optimizer(torch.optim.AdamW)
else:
    optimizer = torch.optim.AdamW(model.parameters())
for _ in range(300):
    model(torch.randn(4, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    zerotune.step_ended()
dist.destroy_process_group()
