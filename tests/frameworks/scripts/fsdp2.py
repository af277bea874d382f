"""FSDP2: fully_shard on each block and on the root."""

import os

import torch
import torch.distributed as dist
import toy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

parser = toy.parser()
parser.add_argument("--keep", action="store_true", help="do not reshard after forward: ZeRO-2")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--mesh", type=int, default=0, metavar="N", help="let a device mesh make groups for N replicas")
options = parser.parse_args()

device_type = toy.device().type
if options.mesh:
    # Two dimensions: shards within the second, replicas along the first.
    shape = options.mesh, int(os.environ["WORLD_SIZE"]) // options.mesh
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
else:
    dist.init_process_group()
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
model = toy.model(options).to(toy.device())
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
policy = half if options.bf16 else MixedPrecisionPolicy()
for block in model.blocks:
    if options.compile:
        block.compile()
    fully_shard(block, mp_policy=policy, reshard_after_forward=not options.keep, mesh=mesh)
fully_shard(model, mp_policy=policy, reshard_after_forward=not options.keep, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
toy.train(model, optimizer, options, dist.get_rank())
dist.destroy_process_group()
