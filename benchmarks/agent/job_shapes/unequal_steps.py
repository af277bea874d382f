"""Jobs whose ranks step their optimizers unequally often, or never."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.agent.job_shapes.job import Job, adamw, average_gradients, flat, load_flat, mlp, shape, train


@shape()
def gan_by_rank(job: Job) -> None:
    """Generator and critic on a rank each: one steps once a round and the other five times."""
    model = mlp()
    optimizer = adamw(model)
    for turn in range(120):
        for _ in range(1 if job.rank == 0 else 5):
            loss = train(model, optimizer, job.batch(turn))
        for source in range(job.n_ranks):
            dist.broadcast(flat(model), source)
        dist.all_reduce(torch.ones(4096))
        job.say(loss)


@shape(4)
def actor_and_critic(job: Job) -> None:
    """Two ranks are actors and two are critics, each pair under DDP; critics step four times as often."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    is_critic = job.rank >= 2
    model = DistributedDataParallel(mlp(), process_group=pairs[is_critic])
    optimizer = adamw(model)
    for turn in range(120):
        for part in range(4 if is_critic else 1):
            loss = train(model, optimizer, job.batch(10 * turn + part))
        weights = flat(model)
        dist.broadcast(weights, 0)
        dist.broadcast(weights, 2)
        job.say(loss, weights[0])


@shape(3)
def population(job: Job) -> None:
    """Each rank trains a model of its own, with its own number of steps; now and then all take over the best one."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (job.rank + 1))
    for turn in range(120):
        for part in range(1 + job.rank):
            loss = train(model, optimizer, job.batch(10 * turn + part))
        scores = [torch.zeros(1) for _ in range(job.n_ranks)]
        dist.all_gather(scores, loss.reshape(1))
        weights = flat(model)
        dist.broadcast(weights, int(torch.cat(scores).argmin()))
        if turn % 10 == 9:
            load_flat(model, weights)
        job.say(loss)


@shape(3)
def early_stopping(job: Job) -> None:
    """Ranks stop stepping one after the other, but still take part in the common collectives."""
    model = mlp()
    optimizer = adamw(model)
    for step in range(240):
        loss = model(job.batch(step)).pow(2).mean()
        if step < 80 * (job.rank + 1):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total = flat(model)
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        job.say(loss.detach(), total.norm())


@shape(4)
def rollout_workers(job: Job) -> None:
    """Two ranks train under DDP; the others receive the weights, play, and never step."""
    trainers = dist.new_group([0, 1])
    model = mlp()
    trained = DistributedDataParallel(model, process_group=trainers) if job.rank < 2 else None
    optimizer = adamw(model)
    for turn in range(150):
        if trained is not None:
            for part in range(2):
                train(trained, optimizer, job.batch(2 * turn + part))
        weights = flat(model)
        dist.broadcast(weights, 0)
        score = weights.norm().reshape(1)
        dist.all_reduce(score)
        if turn % 10 == 0:
            dist.all_gather([torch.empty_like(weights) for _ in range(job.n_ranks)], weights)
        job.say(score)


@shape(3)
def evaluator(job: Job) -> None:
    """One rank evaluates the model of the others; they meet every tenth step only."""
    trainers = dist.new_group([0, 1])
    model = mlp()
    optimizer = adamw(model)
    for step in range(200):
        loss = torch.zeros(())
        if job.rank < 2:
            optimizer.zero_grad()
            loss = model(job.batch(step)).pow(2).mean()
            loss.backward()
            average_gradients(model, trainers)
            optimizer.step()
        if step % 10 == 9:
            weights = flat(model)
            dist.broadcast(weights, 0)
            load_flat(model, weights)
            if job.rank == 2:
                loss = model(job.batch(step)).pow(2).mean()
        job.say(loss.detach())


@shape(4)
def trainers_and_rollout(job: Job) -> None:
    """RL: two ranks train a sharded model and hand its weights to two that generate with a copy."""
    from torch.distributed.fsdp import fully_shard

    trainers, players = dist.new_group([0, 1]), dist.new_group([2, 3])
    mesh = dist.device_mesh.DeviceMesh.from_group(trainers, "cpu", mesh=[0, 1]) if job.rank < 2 else None
    model = mlp()
    optimizer = None
    if mesh is not None:
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = adamw(model)
    weights = torch.zeros(3 * (2 * 64 * 256 + 256 + 64))
    for turn in range(100):
        told = torch.zeros(())
        if optimizer is not None:
            for part in range(2):
                told = train(model, optimizer, job.batch(2 * turn + part))
            parts = [one.full_tensor().reshape(-1) for one in model.parameters()]  # type: ignore[attr-defined]
            weights = torch.cat(parts).detach()
        dist.broadcast(weights, 0)
        if job.rank >= 2:
            load_flat(model, weights)
            told = torch.zeros(())
            for part in range(6):
                hidden = model(job.batch(part)).detach()
                dist.all_reduce(hidden, group=players)
                told = told + hidden.pow(2).mean()
        job.say(told)


@shape()
def diloco(job: Job) -> None:
    """Many local steps, then one outer step on the ranks' differences: the first collective comes late."""
    model = mlp()
    inner = adamw(model)
    outer_model = mlp()
    outer = torch.optim.SGD(outer_model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(300):
        loss = train(model, inner, job.batch(step))
        if step % 10 == 9:
            for there, here in zip(outer_model.parameters(), model.parameters(), strict=True):
                there.grad = there.detach() - here.detach()
                dist.all_reduce(there.grad, op=dist.ReduceOp.AVG)
            outer.step()
            load_flat(model, flat(outer_model))
        job.say(loss)


@shape()
def local_sgd(job: Job) -> None:
    """Ranks train alone and average their parameters every fifth step."""
    model = mlp()
    optimizer = adamw(model)
    for step in range(300):
        loss = train(model, optimizer, job.batch(step))
        if step % 5 == 4:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data, op=dist.ReduceOp.AVG)
        job.say(loss)


@shape()
def wgan_gp(job: Job) -> None:
    """The critic's loss holds a gradient penalty by `autograd.grad`; the generator steps every fifth time."""
    critic, generator = mlp(1), DistributedDataParallel(mlp(1))
    critic_optimizer, generator_optimizer = adamw(critic), adamw(generator)
    for step in range(200):
        real = job.batch(step).requires_grad_()
        (slope,) = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
        critic_optimizer.zero_grad()
        with torch.no_grad():
            fake = generator(job.batch(step + 1))
        loss = critic(fake).mean() - critic(real).mean() + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        average_gradients(critic)
        critic_optimizer.step()
        if step % 5 == 4:
            generator_optimizer.zero_grad()
            gain: Any = nn.functional.softplus(-critic(generator(job.batch(step)))).mean()
            gain.backward()
            generator_optimizer.step()
        job.say(loss.detach())
