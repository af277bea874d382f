"""Our own ZeRO-3."""

import torch
import torch.distributed as dist
import toy

from zerotune import zero_runtime

options = toy.parser().parse_args()
dist.init_process_group()
model = toy.model(options).to(toy.device())
engine = zero_runtime.shard(model, stage=3)
optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-2)
toy.train(model, optimizer, options, dist.get_rank())
dist.destroy_process_group()
