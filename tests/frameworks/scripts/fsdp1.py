"""FSDP1: FullyShardedDataParallel with an auto-wrap policy."""

import functools

import torch
import torch.distributed as dist
import toy
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

parser = toy.parser()
parser.add_argument("--keep", action="store_true", help="SHARD_GRAD_OP: ZeRO-2")
options = parser.parse_args()

dist.init_process_group()
model = FullyShardedDataParallel(
    toy.model(options),
    device_id=toy.device(),
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if options.keep else ShardingStrategy.FULL_SHARD,
    auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={toy.Block}),
    use_orig_params=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
toy.train(model, optimizer, options, dist.get_rank())
dist.destroy_process_group()
