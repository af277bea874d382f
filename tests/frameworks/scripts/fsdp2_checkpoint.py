"""FSDP2 that saves a distributed checkpoint every tenth step, and all parameters on one rank at the end."""

import tempfile

import torch
import torch.distributed as dist
import toy
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard

options = toy.parser().parse_args()
dist.init_process_group()
model = toy.model(options).to(toy.device())
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
log = toy.LossLog(options.losses, dist.get_rank())
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
for step, inputs in enumerate(toy.batches(options, dist.get_rank()), start=1):
    loss = toy.loss_of(model, inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    log.add(loss)
    if step % 10 == 0:
        weights, states = get_state_dict(model, optimizer)
        checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder[0]}/{step}")
get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
dist.destroy_process_group()
