"""Group semantics: similar collectives of one group are fused and share one decision.

NCCL bins a group's tasks by function, operator and type, and sorts each bin by size. It fuses tasks as long as the next
one's traffic is below four times that of the smallest. The tuner is asked once for all fused tasks, with the sum of
their bytes. One kernel runs the whole group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch._C._distributed_c10d import Work

from .....store.records import Collective
from ..torch_backend import capture
from ..torch_backend.reduction import Operator
from ..torch_backend.work import EmulatedWork
from .calls import FusedTasks, Path, Task
from .communicator import Communicator

FUSE_BELOW: Final = 4
_BYTES_ALIKE: Final = (Collective.all_gather, Collective.broadcast)
"""NCCL runs these on bytes, so tasks of several types are fused."""


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
    """Issue all collectives of one group, or add them to the graph that is being captured."""
    fused_groups = fuse_group(communicator, group)
    outputs = [output for deferred in group for output in deferred.outputs]
    n_tasks = sum(len(deferred.tasks) for deferred in group)
    graph = capture.current()
    if graph is not None:
        return graph.add(communicator, fused_groups, n_tasks, outputs)
    return EmulatedWork(communicator.issue(fused_groups, n_tasks), outputs)


def fuse_group(communicator: Communicator, group: Sequence[Deferred]) -> list[FusedTasks]:
    """The tasks of a group, fused."""
    if len(group) == 1 and len(group[0].tasks) == 1:
        only = group[0]
        return [
            _fused_tasks(only, only.tasks, communicator.registered_buffers.path(only.collective, only.op, only.tasks))
        ]
    fused_groups: list[FusedTasks] = []
    bins: dict[tuple[Any, ...], _Bin] = {}
    for deferred in group:
        if deferred.collective is Collective.all_to_all:
            fused_groups.append(_fused_tasks(deferred, deferred.tasks, Path.kernel))
            continue
        path = communicator.registered_buffers.path(deferred.collective, deferred.op, deferred.tasks)
        dtype = None if deferred.collective in _BYTES_ALIKE else deferred.dtype
        key = deferred.collective, deferred.op.code, dtype, path
        bins.setdefault(key, _Bin(deferred, path)).tasks.extend(deferred.tasks)
    for each in bins.values():
        fused_groups += (_fused_tasks(each.first, tasks, each.path) for tasks in _by_size(each.tasks))
    return fused_groups


def _by_size(tasks: list[Task]) -> list[list[Task]]:
    fused_groups: list[list[Task]] = []
    for task in sorted(tasks, key=lambda task: task.message_bytes):  # stable: equal on all ranks
        if fused_groups and task.message_bytes < FUSE_BELOW * fused_groups[-1][0].message_bytes:
            fused_groups[-1].append(task)
        else:
            fused_groups.append([task])
    return fused_groups


def _fused_tasks(deferred: Deferred, tasks: list[Task], path: Path) -> FusedTasks:
    return FusedTasks(deferred.collective, tasks, deferred.dtype, deferred.op, deferred.root, deferred.even, path)
