"""One rank of a job in `chaos.py`: trains until a file asks it to stop, and logs each step.

A step's line has its loss and its times in ms: `wall`, of which the training thread waited for a processor (`queued`),
and the longest passage of that thread through the agent's code, `ours`, and what is left of it, `ours_alone`, without
such waiting of that thread and of those that it may wait for there: the agreement's on rank 0 and on this rank, and the
job's store in torchrun's process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerotune import zero_runtime
from zerotune.agent import activate
from zerotune.zero_runtime.examples.gpt import GPT, GPTShape

N_STEPS_AT_MOST = 1_000_000
JOINED_AT_STEP = 3
"""The agent's threads are there by then; steps that are judged follow."""


class Queued:
    """How long some threads waited for a processor while they could have run: Linux's run delay.

    Args:
        threads: their folders below /proc.
    """

    def __init__(self, *threads: Path) -> None:
        self._files = [os.open(one / "schedstat", os.O_RDONLY | os.O_CLOEXEC) for one in threads]

    def ms(self) -> float:
        """So far, all together."""
        return sum(int(os.pread(file, 100, 0).split()[1]) for file in self._files) / 1e6


def own_thread() -> Path:
    """The folder of the thread that calls."""
    return Path(f"/proc/self/task/{threading.get_native_id()}")


def waited_for() -> list[Path]:
    """Folders of the threads that the training thread may wait for at a boundary, once the agent has joined the job."""
    mine = [one.native_id for one in threading.enumerate() if one.name == "zerotune-agreement"]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, [f"/proc/{os.getpid()}/task/{one}" for one in mine])
    store = [*Path(f"/proc/{os.getppid()}/task").iterdir()]
    return [*map(Path, dict.fromkeys([*told[0], *told[dist.get_rank()]])), *store]


class Passages:
    """What the agent's code takes of the training thread, between two calls of `longest`."""

    def __init__(self, queued: Queued) -> None:
        self.queued = queued
        self._wall_ms = self._alone_ms = 0.0
        installed = activate.installed
        if installed is not None:
            hooks = installed.hooks
            hooks._on_region, hooks._on_boundary = self._timed(hooks._on_region), self._timed(hooks._on_boundary)

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*words: int) -> None:
            queued, began_s = self.queued, time.perf_counter()
            queued_ms = queued.ms()
            try:
                call(*words)
            finally:
                wall_ms = 1e3 * (time.perf_counter() - began_s)
                self._wall_ms = max(self._wall_ms, wall_ms)
                self._alone_ms = max(self._alone_ms, wall_ms - (queued.ms() - queued_ms))

        return timed

    def longest(self) -> dict[str, float]:
        """Its longest passage, by the names of the log."""
        told = {"ours": self._wall_ms, "ours_alone": self._alone_ms}
        self._wall_ms = self._alone_ms = 0.0
        return told


def sharded(runtime: str, model: Any) -> tuple[Any, Any]:
    """Model and optimizer under FSDP2, or under our own runtime."""
    if runtime == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = zero_runtime.shard(model, stage=3)
    return model, engine.optimizer(torch.optim.AdamW, lr=1e-3)


def main() -> None:
    runtime, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group()
    torch.manual_seed(0)
    shape = GPTShape(n_layers=2, width=32)
    model, optimizer = sharded(runtime, GPT(shape))
    draw = torch.Generator().manual_seed(dist.get_rank())
    is_first = dist.get_rank() == 0
    queued = Queued(own_thread())
    passages = Passages(queued)
    with open(folder / f"{os.getpid()}.{dist.get_rank()}.jsonl", "w", buffering=1) as log:
        began_s, queued_ms = time.perf_counter(), queued.ms()
        for step in range(N_STEPS_AT_MOST):
            if step == JOINED_AT_STEP and activate.installed is not None:
                passages.queued = Queued(own_thread(), *waited_for())
            tokens = torch.randint(255, (1, shape.n_context + 1), generator=draw)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told = torch.tensor([loss.item(), float(is_first and (folder / "stop").exists())])
            dist.all_reduce(told)
            now_s, now_queued_ms = time.perf_counter(), queued.ms()
            times_ms = {"wall": 1e3 * (now_s - began_s), "queued": now_queued_ms - queued_ms, **passages.longest()}
            print(json.dumps({"loss": float(told[0]).hex(), **times_ms}), file=log)
            began_s, queued_ms = now_s, now_queued_ms
            if told[1]:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
