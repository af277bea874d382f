"""Jobs whose ranks change while they run."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.agent.job_shapes.job import Job, adamw, average_gradients, mlp, shape, train


@shape(3, makes_group=False)
def smaller_world(job: Job) -> None:
    """The world is torn down and made again with fewer ranks; the script restarts them within its processes."""
    model = mlp()
    optimizer = adamw(model)
    for n_ranks in (3, 2):
        if job.rank >= n_ranks:
            return
        store = dist.PrefixStore(str(n_ranks), _store())
        dist.init_process_group("nccl", store=store, rank=job.rank, world_size=n_ranks)
        for step in range(150):
            optimizer.zero_grad()
            loss = model(job.batch(step)).pow(2).mean()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            job.say(loss.detach())
        dist.destroy_process_group()


def _store() -> dist.Store:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


@shape(3)
def shrunk_group(job: Job) -> None:
    model = mlp()
    optimizer = adamw(model)
    for step in range(300):
        if step == 150:
            dist.barrier()
            if job.rank == 2:
                return
            dist.shrink_group([2])
        optimizer.zero_grad()
        loss = model(job.batch(step)).pow(2).mean()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        job.say(loss.detach())


@shape(2, max_restarts=1)
def elastic_restart(job: Job) -> None:
    """A rank fails half-way; its launcher starts all ranks again, and they go on from a checkpoint."""
    model = mlp()
    trained = DistributedDataParallel(model)
    optimizer = adamw(model)
    first, checkpoint = 0, job.folder / "checkpoint.pt"
    if job.n_restarts:
        kept = torch.load(checkpoint, weights_only=True)
        first = kept["step"]
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    for step in range(first, 360):
        if step == 180 and not job.n_restarts:
            if job.rank == 0:
                kept = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(kept, checkpoint)
            dist.barrier()
            if job.rank == 1:
                raise SystemExit(7)
        job.say(train(trained, optimizer, job.batch(step)))
