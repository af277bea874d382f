"""Jobs that shard parameters, gradients or optimizer state."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.agent.job_shapes.job import Job, adamw, average_gradients, mlp, shape, train
from zerotune import zero_runtime


@shape()
def fsdp2(job: Job) -> None:
    model = mlp()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(model)
    for step in range(150):
        job.say(train(model, optimizer, job.batch(step)))


@shape()
def fsdp2_accumulating(job: Job) -> None:
    """FSDP2 that keeps gradients unreduced for all but the last of four micro-batches."""
    model = mlp()
    for block in model:
        fully_shard(block)
    sharded = fully_shard(model)
    optimizer = adamw(model)
    for step in range(80):
        optimizer.zero_grad()
        for part in range(4):
            sharded.set_requires_gradient_sync(part == 3)
            loss = model(job.batch(10 * step + part)).pow(2).mean()
            loss.backward()
        optimizer.step()
        job.say(loss.detach())


@shape(4)
def hsdp(job: Job) -> None:
    """Sharded in pairs, replicated between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = mlp()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    for step in range(120):
        job.say(train(model, optimizer, job.batch(step)))


def _zero(job: Job, stage: int) -> None:
    model = mlp()
    engine = zero_runtime.shard(model, stage=stage)
    optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-3)
    for step in range(200):
        loss = model(job.batch(step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.say(loss.detach())


@shape()
def zero_stage_1(job: Job) -> None:
    _zero(job, 1)


@shape()
def zero_stage_2(job: Job) -> None:
    _zero(job, 2)


@shape()
def zero_stage_3(job: Job) -> None:
    _zero(job, 3)


@shape(4)
def expert_parallel(job: Job) -> None:
    """Each pair of ranks shares its tokens among two experts; the common parameters are averaged over all ranks."""
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    twins = [dist.new_group([first, first + 2]) for first in (0, 1)]
    pair, twin = pairs[job.rank // 2], twins[job.rank % 2]
    shared, expert = mlp(1), mlp(1)
    optimizers = [adamw(shared), adamw(expert)]
    for step in range(150):
        for optimizer in optimizers:
            optimizer.zero_grad()
        tokens = shared(job.batch(step))
        there = dist.nn.functional.all_to_all_single(torch.empty_like(tokens), tokens, group=pair)  # type: ignore[attr-defined]
        back = dist.nn.functional.all_to_all_single(torch.empty_like(tokens), expert(there), group=pair)  # type: ignore[attr-defined]
        loss = back.pow(2).mean()
        loss.backward()
        average_gradients(shared)
        average_gradients(expert, twin)
        for optimizer in optimizers:
            optimizer.step()
        job.say(loss.detach())
