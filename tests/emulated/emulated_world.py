"""Real processes that form a process group on the emulated NCCL and run functions on request."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ANSWER_WITHIN_S = 110


class World:
    """`n_ranks` processes; `run(function, *arguments)` calls it on all and returns their results by rank."""

    def __init__(self, n_ranks: int, folder: Path, **environment: str) -> None:
        context = multiprocessing.get_context("forkserver")
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
        self.n_ranks = n_ranks
        self.processes = []
        self._pipes: list[Connection] = []
        for rank in range(n_ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, n_ranks, str(folder), environment)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def send(self, rank: int, function: Callable[..., Any], *arguments: Any) -> None:
        self._pipes[rank].send((function, arguments))

    def receive(self, rank: int) -> Any:
        ok, result = self._answer(rank)
        assert ok, f"rank {rank}:\n{result}"
        return result

    def _answer(self, rank: int) -> tuple[bool, Any]:
        assert self._pipes[rank].poll(ANSWER_WITHIN_S), f"rank {rank} does not answer"
        answer: tuple[bool, Any] = self._pipes[rank].recv()
        return answer

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for rank in range(self.n_ranks):
            self.send(rank, function, *arguments)
        answers = [self._answer(rank) for rank in range(self.n_ranks)]  # all, or the next call would get the rest
        failed = [f"rank {rank}:\n{result}" for rank, (ok, result) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [result for _, result in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(pipe: Connection, rank: int, n_ranks: int, folder: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    import zerotune.agent.nccl.emulated  # noqa: F401 - registers the backend

    join(folder, rank, n_ranks, "first")
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, function(rank, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    os._exit(0)  # taking groups and an interpreter with torch apart takes long


def join(folder: str, rank: int, n_ranks: int, name: str) -> None:
    """Make the default group; `name` is new for every time."""
    store = dist.FileStore(f"{folder}/store-{name}", n_ranks)
    dist.init_process_group("emulated_nccl", store=store, rank=rank, world_size=n_ranks)


def subgroup(n_ranks: int) -> Any:
    """A group of the first `n_ranks` ranks, or None on the others; all ranks must call it."""
    group = dist.new_group(list(range(n_ranks)))
    return group if group is not dist.GroupMember.NON_GROUP_MEMBER else None
