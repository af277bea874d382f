"""Group semantics: collectives of one group are sorted, and fused into runs that share one decision.

NCCL bins a group's tasks by function, operator and type, walks each bin by ascending size, and fuses while a
task's traffic is below four times that of the run's smallest; the tuner is asked once per run, with the sum.
Then one kernel carries the whole group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch._C._distributed_c10d import Work

from zerotune.agent.nccl.emulated.host.calls import Path, Run, Task
from zerotune.agent.nccl.emulated.host.communicator import Communicator
from zerotune.agent.nccl.emulated.torch_backend import capture
from zerotune.agent.nccl.emulated.torch_backend.reduction import Operator
from zerotune.agent.nccl.emulated.torch_backend.work import EmulatedWork
from zerotune.store.records import Collective

FUSE_BELOW: Final = 4
_BYTES_ALIKE: Final = (Collective.all_gather, Collective.broadcast)
"""NCCL turns these into byte collectives, so types do not keep them apart."""


@dataclass(frozen=True)
class Deferred:
    """One collective call of a group, not issued yet."""

    collective: Collective
    tasks: list[Task]
    outputs: Sequence[torch.Tensor]
    dtype: torch.dtype
    op: Operator
    root: int
    even: bool


@dataclass
class _Bin:
    first: Deferred
    path: Path
    tasks: list[Task] = field(default_factory=list)


def launch(communicator: Communicator, group: Sequence[Deferred]) -> Work:
    """Issue all collectives of one group, or let the graph that is being captured have them."""
    runs = _runs(communicator, group)
    outputs = [output for deferred in group for output in deferred.outputs]
    n_tasks = sum(len(deferred.tasks) for deferred in group)
    graph = capture.current()
    if graph is not None:
        return graph.add(communicator, runs, n_tasks, outputs)
    calls = [communicator.issue(run, n_tasks=n_tasks) for run in runs]
    communicator.events.enqueued(calls)
    return EmulatedWork(calls, outputs)


def _runs(communicator: Communicator, group: Sequence[Deferred]) -> list[Run]:
    if len(group) == 1 and len(group[0].tasks) == 1:
        only = group[0]
        return [_run(only, only.tasks, communicator.windows.path(only.collective, only.op, only.tasks))]
    runs: list[Run] = []
    bins: dict[tuple[Any, ...], _Bin] = {}
    for deferred in group:
        if deferred.collective is Collective.all_to_all:
            runs.append(_run(deferred, deferred.tasks, Path.kernel))
            continue
        path = communicator.windows.path(deferred.collective, deferred.op, deferred.tasks)
        dtype = None if deferred.collective in _BYTES_ALIKE else deferred.dtype
        key = deferred.collective, deferred.op.code, dtype, path
        bins.setdefault(key, _Bin(deferred, path)).tasks.extend(deferred.tasks)
    for each in bins.values():
        runs += (_run(each.first, tasks, each.path) for tasks in _fused(each.tasks))
    return runs


def _fused(tasks: list[Task]) -> list[list[Task]]:
    runs: list[list[Task]] = []
    for task in sorted(tasks, key=lambda task: task.message_bytes):  # stable: alike on all ranks
        if runs and task.message_bytes < FUSE_BELOW * runs[-1][0].message_bytes:
            runs[-1].append(task)
        else:
            runs.append([task])
    return runs


def _run(deferred: Deferred, tasks: list[Task], path: Path) -> Run:
    return Run(deferred.collective, tasks, deferred.dtype, deferred.op, deferred.root, deferred.even, path)
