"""Jobs that communicate in threads beside the one that trains."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import async_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from benchmarks.agent.job_shapes.job import WIDTH, Job, adamw, mlp, shape, train


@shape(makes_group=False)
def asynchronous_checkpoints(job: Job) -> None:
    """DCP saves from a thread of its own, on a gloo group beside NCCL's."""
    dist.init_process_group("cpu:gloo,cuda:nccl")
    beside = dist.new_group(backend="gloo")
    model = mlp()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(model)
    saving: Future[Any] | None = None
    for step in range(150):
        job.say(train(model, optimizer, job.batch(step)))
        if step % 50 == 20:
            if saving is not None:
                saving.result()
            of_model, of_optimizer = get_state_dict(model, optimizer)
            state = {"model": of_model, "optimizer": of_optimizer}
            begun = async_save(state, checkpoint_id=job.folder / f"step-{step}", process_group=beside)
            assert isinstance(begun, Future)
            saving = begun
    assert saving is not None
    saving.result()


@shape()
def prefetcher(job: Job) -> None:
    """A thread of each rank exchanges the next batches on a group of its own."""
    beside = dist.new_group()
    model = mlp()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(model)
    ready: queue.Queue[torch.Tensor] = queue.Queue(maxsize=4)

    def prefetch() -> None:
        for step in range(200):
            both = torch.empty(16, WIDTH)
            dist.all_gather_into_tensor(both, job.batch(step), group=beside)
            ready.put(both)

    thread = threading.Thread(target=prefetch, name="prefetcher")
    thread.start()
    for _ in range(200):
        job.say(train(model, optimizer, ready.get()))
    thread.join()


@shape()
def metrics_in_a_thread(job: Job) -> None:
    """A thread sums metrics on a group of its own, at its own speed, until the training is over."""
    beside = dist.new_group()
    model = mlp()
    optimizer = adamw(model)
    told: queue.Queue[torch.Tensor | None] = queue.Queue()

    def add_up() -> None:
        while (value := told.get()) is not None:
            dist.all_reduce(value, op=dist.ReduceOp.AVG, group=beside)

    thread = threading.Thread(target=add_up, name="metrics")
    thread.start()
    for step in range(250):
        optimizer.zero_grad()
        loss = model(job.batch(step)).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        told.put(torch.full((1024,), float(loss)))
        job.say(loss.detach())
    told.put(None)
    thread.join()
