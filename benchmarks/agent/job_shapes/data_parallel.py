"""Data-parallel jobs: DDP as it is, with uneven inputs, and with common additions of scripts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.agent.job_shapes.job import Job, adamw, average_gradients, mlp, shape, train


@shape(4)
def ddp(job: Job) -> None:
    model = DistributedDataParallel(mlp())
    optimizer = adamw(model)
    for step in range(250):
        job.say(train(model, optimizer, job.batch(step)))


def _join(job: Job, n_batches: list[int]) -> None:
    model = DistributedDataParallel(mlp())
    optimizer = adamw(model)
    for n in n_batches:
        with model.join():
            for step in range(n):
                job.say(train(model, optimizer, job.batch(step)))


@shape()
def join_uneven(job: Job) -> None:
    """Ranks have unequal numbers of batches, the same in each epoch, under DDP's own `join`."""
    _join(job, [30 + 5 * job.rank] * 8)


@shape()
def join_growing(job: Job) -> None:
    """As `join_uneven`; a curriculum lets one rank's epochs grow."""
    _join(job, [40 + 7 * job.rank + epoch * (1 - job.rank) for epoch in range(6)])


@shape()
def accumulation_by_rank(job: Job) -> None:
    """Ranks accumulate gradients over unequal numbers of micro-batches, as with sequences of unequal lengths."""
    model = DistributedDataParallel(mlp())
    optimizer = adamw(model)
    for step in range(200):
        optimizer.zero_grad()
        with model.no_sync():
            for part in range(1 + 2 * job.rank):
                model(job.batch(10 * step + part)).pow(2).mean().backward()
        loss = model(job.batch(step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        job.say(loss.detach())


@shape()
def metrics_around_backward(job: Job) -> None:
    """One rank sums its metrics before backward and the other after it: the same collectives in the same order."""
    model = mlp(1)
    optimizer = adamw(model)
    metrics = torch.ones(65536)
    for step in range(250):
        optimizer.zero_grad()
        loss = model(job.batch(step)).pow(2).mean()
        if job.rank == 1:
            dist.all_reduce(metrics, op=dist.ReduceOp.AVG)
        loss.backward()
        if job.rank == 0:
            dist.all_reduce(metrics, op=dist.ReduceOp.AVG)
        average_gradients(model)
        optimizer.step()
        job.say(loss.detach(), metrics[0])


@shape()
def overflow_by_rank(job: Job) -> None:
    """Each rank owns a part of the parameters, and skips its step alone if its own fp16 gradients overflow."""
    model = mlp()
    parameters = list(model.parameters())
    owner = [number * job.n_ranks // len(parameters) for number in range(len(parameters))]
    own = [one for one, rank in zip(parameters, owner, strict=True) if rank == job.rank]
    optimizer = torch.optim.AdamW(own, lr=1e-3)
    for step in range(250):
        model.zero_grad()
        loss = model(job.batch(step)).pow(2).mean()
        loss.backward()
        average_gradients(model)
        if step % 7 != 3 * job.rank:
            optimizer.step()
        for one, rank in zip(parameters, owner, strict=True):
            dist.broadcast(one.data, rank)
        job.say(loss.detach())


@shape(4)
def groups_late(job: Job) -> None:
    """Half-way a job makes more groups, of all ranks and of pairs, and uses them beside the first one."""
    model = DistributedDataParallel(mlp(1))
    optimizer = adamw(model)
    pair: dist.ProcessGroup | None = None
    everybody: dist.ProcessGroup | None = None
    for step in range(240):
        if step == 120:
            pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
            pair, everybody = pairs[job.rank // 2], dist.new_group()
        loss = train(model, optimizer, job.batch(step))
        means = torch.full((16384,), float(loss))
        if pair is not None:
            dist.all_reduce(means, op=dist.ReduceOp.AVG, group=pair)
            dist.all_reduce(means, op=dist.ReduceOp.AVG, group=everybody)
        job.say(loss, means[0])


@shape()
def several_models(job: Job) -> None:
    """A student under DDP, its teacher, and a second model with an optimizer of its own that steps less often."""
    student, critic = DistributedDataParallel(mlp()), DistributedDataParallel(mlp(1))
    teacher = mlp()
    optimizers = [adamw(student), adamw(critic)]
    for step in range(200):
        batch = job.batch(step)
        optimizers[0].zero_grad()
        loss = nn.functional.mse_loss(student(batch), teacher(batch).detach()) + student(batch).abs().mean()
        loss.backward()
        optimizers[0].step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        if step % 3 == 0:
            train(critic, optimizers[1], batch)
        job.say(loss.detach())
