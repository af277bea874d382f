"""DDP, with --compile of a compiled model as nanoGPT does it; with --zero-optimizer its states sharded, ZeRO-1."""

import torch
import torch.distributed as dist
import toy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

parser = toy.parser()
parser.add_argument("--zero-optimizer", action="store_true")
parser.add_argument("--compile", action="store_true")
options = parser.parse_args()

dist.init_process_group(init_method="env://")
device = toy.device()
ids = [device] if device.type == "cuda" else None
model = toy.model(options).to(device)
if options.compile:  # whose graph is cut at buckets, of which the first must not be the largest: it has 1 MB
    model = torch.compile(model)
model = DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=1.0 if options.compile else 0.1)
if options.zero_optimizer:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
toy.train(model, optimizer, options, dist.get_rank())
dist.destroy_process_group()
