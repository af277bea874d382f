"""Group semantics: collectives of one group are sorted, and fused into runs that share one decision.

NCCL bins a group's tasks by function, operator and type, walks each bin by ascending size, and fuses while a
task's traffic is below four times that of the run's smallest; the tuner is asked once per run, with the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from agent.nccl.emulated import capture
from agent.nccl.emulated.communicator import Call, Communicator, Task
from agent.nccl.emulated.reduction import Operator
from agent.nccl.emulated.work import EmulatedWork
from store.records import Collective

FUSE_BELOW: Final = 4
_BYTES_ALIKE: Final = (Collective.all_gather, Collective.broadcast)
"""NCCL turns these into byte collectives, so types do not keep them apart."""


@dataclass(frozen=True)
class Deferred:
    """One collective call of a group, not issued yet."""

    collective: Collective
    tasks: Sequence[Task]
    outputs: Sequence[torch.Tensor]
    dtype: torch.dtype
    op: Operator
    root: int
    even: bool


def launch(communicator: Communicator, group: Sequence[Deferred]) -> EmulatedWork:
    """Issue all collectives of one group."""
    if len(group) == 1 and (len(group[0].tasks) == 1 or group[0].collective is Collective.all_to_all):
        only = group[0]
        return EmulatedWork((_issue(communicator, only, only.tasks, 1),), only.outputs)
    bins: dict[tuple[Collective, int, torch.dtype | None], list[tuple[Deferred, Task]]] = {}
    calls: list[Call] = []
    outputs: list[torch.Tensor] = []
    n_tasks = sum(len(deferred.tasks) for deferred in group)
    for deferred in group:
        outputs += deferred.outputs
        if deferred.collective is Collective.all_to_all:
            calls.append(_issue(communicator, deferred, deferred.tasks, n_tasks))
            continue
        dtype = None if deferred.collective in _BYTES_ALIKE else deferred.dtype
        members = bins.setdefault((deferred.collective, deferred.op.code, dtype), [])
        members += ((deferred, task) for task in deferred.tasks)
    for members in bins.values():
        for run in _runs(members):
            first = run[0][0]
            calls.append(_issue(communicator, first, [task for _, task in run], n_tasks))
    return EmulatedWork(calls, outputs)


def _runs(members: list[tuple[Deferred, Task]]) -> list[list[tuple[Deferred, Task]]]:
    ordered = sorted(members, key=lambda member: member[1].message_bytes)  # stable: alike on all ranks
    runs: list[list[tuple[Deferred, Task]]] = []
    for member in ordered:
        if runs and member[1].message_bytes < FUSE_BELOW * runs[-1][0][1].message_bytes:
            runs[-1].append(member)
        else:
            runs.append([member])
    return runs


def _issue(communicator: Communicator, deferred: Deferred, tasks: Sequence[Task], n_tasks: int) -> Call:
    return communicator.issue(
        deferred.collective,
        tasks,
        deferred.dtype,
        redop=deferred.op.code,
        average=deferred.op.is_scaled,
        root=deferred.root if len(tasks) == 1 else -1,
        even=deferred.even,
        n_tasks=n_tasks,
        captured=capture.is_capturing(),
    )
