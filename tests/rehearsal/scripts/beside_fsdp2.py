"""zero_runtime beside FSDP2 with equal layers: it takes no more of the device's memory, and its host never waits."""

import gc
from collections.abc import Callable

import torch
import torch.distributed as dist
import toy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from zerotune import zero_runtime

MOST = 1.05
"""Of FSDP2's memory."""
N_WARM = 3
"""Steps after which memory is steady and the order of layers is agreed."""
N_PRODUCTS = 250
"""Of 20 ms: so long the device is busy with what came before the steps that the host enqueues, N_AHEAD of them."""
N_AHEAD = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Step = Callable[[torch.Tensor], None]


def by_fsdp2(precision: str, reduced: str) -> Step:
    model = toy.model(options).to(device)
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=DTYPES[reduced])
    for layer in (*model.blocks, model):
        fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    return step_of(model, torch.optim.SGD(model.parameters(), lr=1e-3))


def by_zero_runtime(precision: str, reduced: str) -> Step:
    model = toy.model(options).to(device)
    engine = zero_runtime.shard(model, stage=3, precision=precision, reduce_precision=reduced)
    return step_of(model, engine.optimizer(torch.optim.SGD, lr=1e-3))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(inputs: torch.Tensor) -> None:
        toy.loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def look_at(shard: Callable[[str, str], Step], *settings: str) -> tuple[int, bool]:
    """Most bytes in steady steps, and whether the host gives the device steps without waiting for those before."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = shard(*settings)
    for _ in range(N_WARM):
        step(inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(options.steps):
        step(inputs)
    torch.cuda.synchronize()
    n_bytes = torch.cuda.max_memory_allocated() - before

    factor, product = (torch.empty(1 << 14, 1 << 14, device=device) for _ in range(2))
    busy = torch.cuda.Event()
    for _ in range(N_PRODUCTS):
        torch.mm(factor, factor, out=product)
    busy.record()
    for _ in range(N_AHEAD):
        step(inputs)
    is_ahead = not busy.query()
    torch.cuda.synchronize()
    return n_bytes, is_ahead


options = toy.parser().parse_args()
device = toy.device()
dist.init_process_group("nccl")
inputs = torch.zeros(8, options.width, device=device)
step_of(nn.Linear(options.width, options.width).to(device), torch.optim.SGD([inputs]))(inputs)  # cuBLAS takes its part
for settings in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")):
    (theirs, are_ahead), (ours, is_ahead) = look_at(by_fsdp2, *settings), look_at(by_zero_runtime, *settings)
    print(f"rank {dist.get_rank()}, {settings}: {ours:,} bytes, FSDP2 {theirs:,}, {ours / theirs:.3f}", flush=True)
    assert ours <= MOST * theirs, (settings, ours, theirs)
    assert (is_ahead, are_ahead) == (True, True), settings
dist.destroy_process_group()
