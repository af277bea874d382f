"""One world of four gloo processes for a whole test session; smaller worlds are its subgroups."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

N_RANKS = 4
_groups: dict[int, Any] = {}


def group_of(n_ranks: int) -> Any:
    """Inside a rank: the process group of the first `n_ranks` ranks."""
    return _groups[n_ranks]


def _serve(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=N_RANKS)
    for n in range(1, N_RANKS + 1):
        _groups[n] = dist.new_group(list(range(n)))
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, args = job
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
    os._exit(0)  # taking an interpreter with torch apart takes seconds


class World:
    """Runs a module-level function on the first n ranks and returns what each of them returned."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes = []
        self._hung = ""
        for rank in range(N_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, n_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        assert not self._hung, f"an earlier test left ranks hanging: {self._hung}"
        for pipe in self._pipes[:n_ranks]:
            pipe.send((function, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + 100
        while len(answers) < n_ranks and time.monotonic() < deadline:
            for pipe in wait([p for r, p in enumerate(self._pipes[:n_ranks]) if r not in answers], timeout=1):
                rank = self._pipes.index(pipe)
                answers[rank] = pipe.recv()
                if not answers[rank][0]:  # the others may wait for it in vain
                    deadline = min(deadline, time.monotonic() + 5)
        failures = "".join(f"rank {rank}: {value}" for rank, (ok, value) in answers.items() if not ok)
        if len(answers) < n_ranks:
            self._hung = f"ranks other than {sorted(answers)} in {function.__name__}{args}; {failures or answers}"
        assert not self._hung, self._hung
        assert not failures, failures
        return [answers[rank][1] for rank in range(n_ranks)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(0 if self._hung else 10)
            if process.is_alive():
                process.kill()
