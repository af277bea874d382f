"""Jobs that split the model by tensors or by stages, alone and with sharding."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.agent.job_shapes.job import WIDTH, Job, adamw, average_gradients, mlp, shape, train

N_PARTS = 4
"""Micro-batches of a pipeline's step."""


@shape(4)
def tensor_parallel_fsdp(job: Job) -> None:
    """Each block is split over two ranks, and sharded over the two pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = mlp(2)
    for block in model:
        parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = adamw(model)
    for step in range(120):
        draw = torch.Generator().manual_seed(1000 * step + job.rank // 2)
        job.say(train(model, optimizer, torch.randn(8, WIDTH, generator=draw)))


def _stage(job: Job, model: nn.Module, step: int, before: int | None, after: int | None) -> torch.Tensor:
    """One step of a pipeline that does all forwards and then all backwards."""
    inputs, outputs, total = [], [], torch.zeros(())
    for part in range(N_PARTS):
        got = job.batch(N_PARTS * step + part)
        if before is not None:
            dist.recv(got, before)
            got.requires_grad_()
        inputs.append(got)
        outputs.append(model(got))
        if after is not None:
            dist.send(outputs[-1].detach(), after)
    for got, output in zip(inputs, outputs, strict=True):
        if after is None:
            loss = output.pow(2).mean()
            loss.backward()
            total += loss.detach()
        else:
            gradient = torch.empty_like(output)
            dist.recv(gradient, after)
            torch.autograd.backward(output, gradient)
        if before is not None:
            assert got.grad is not None
            dist.send(got.grad, before)
    return total


@shape(3)
def pipeline_unequal(job: Job) -> None:
    """A pipeline whose stages have unequal numbers of blocks and of optimizers; norms are summed."""
    model = mlp(1 + job.rank)
    optimizers = [adamw(block) for block in model]
    for step in range(150):
        for optimizer in optimizers:
            optimizer.zero_grad()
        before = job.rank - 1 if job.rank else None
        after = job.rank + 1 if job.rank + 1 < job.n_ranks else None
        total = _stage(job, model, step, before, after)
        norm = torch.stack([one.grad.pow(2).sum() for one in model.parameters() if one.grad is not None]).sum()
        dist.all_reduce(norm)
        for optimizer in optimizers:
            optimizer.step()
        job.say(total, norm)


@shape(4)
def pipeline_fsdp(job: Job) -> None:
    """Two stages on two ranks each; each stage is sharded over its ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = job.rank // 2
    mesh = DeviceMesh.from_group(groups[stage], "cpu", mesh=[2 * stage, 2 * stage + 1])
    model = mlp(1 + stage)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    for step in range(80):
        optimizer.zero_grad()
        before, after = (job.rank - 2, None) if stage else (None, job.rank + 2)
        job.say(_stage(job, model, step, before, after))
        optimizer.step()


@shape(4)
def sequence_parallel(job: Job) -> None:
    """Activations are gathered and scattered by hand around each block; gradients are averaged over the others."""
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    twins = [dist.new_group([first, first + 2]) for first in (0, 1)]
    pair, twin = pairs[job.rank // 2], twins[job.rank % 2]
    model = mlp(2)
    optimizer = adamw(model)
    for step in range(150):
        optimizer.zero_grad()
        rows = job.batch(step)
        for block in model:
            gathered = torch.empty(2 * len(rows), WIDTH)
            dist.all_gather_into_tensor(gathered, rows.detach(), group=pair)
            mixed = torch.empty(len(rows), WIDTH)
            dist.reduce_scatter_tensor(mixed, block(gathered).detach(), group=pair)
            rows = block(mixed)
        loss: Any = rows.pow(2).mean()
        loss.backward()
        average_gradients(model, twin)
        optimizer.step()
        job.say(loss.detach())
