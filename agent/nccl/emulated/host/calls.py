"""Tasks, tasks fused under one decision, and issued calls of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Protocol

import torch

from .....store.records import Candidate, Collective
from ..torch_backend.reduction import SUM, Operator
from ..transport.rendezvous import Rendezvous

TUNED: Final = frozenset(
    {Collective.broadcast, Collective.reduce, Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce}
)
"""Collectives for which NCCL chooses a setting; other collectives are made of sends and receives."""

NO_SETTING: Final = 255
"""Algorithm and protocol, in headers and events, of a call without a setting."""

Finish = Callable[["IssuedCall", int], None]


class Path(IntEnum):
    """How NCCL runs a collective; it asks the tuner for `kernel` only."""

    kernel = 0
    symmetric = 1
    """A kernel over registered windows."""
    copy_engine = 2
    """Without a kernel."""


@dataclass(slots=True)
class Task:
    """One collective of a group: the data that this rank sends, and a function that takes all ranks' data."""

    piece: torch.Tensor | None
    """Contiguous CPU tensor, copied at issue; None: nothing to send."""
    message_bytes: int
    """Total, NCCL's nBytes."""
    count: int
    """NCCL's count argument."""
    finish: Finish | None
    """Called with the call and this task's piece number once every rank's data have arrived."""
    output: torch.Tensor | None = None
    """The caller's tensor for the result."""
    root: int = 0


@dataclass(slots=True)
class FusedTasks:
    """Tasks of one kind that NCCL fuses: one decision for all of them."""

    collective: Collective
    tasks: Sequence[Task]
    dtype: torch.dtype
    op: Operator = SUM
    root: int = -1
    even: bool = True
    path: Path = Path.kernel

    @property
    def message_bytes(self) -> int:
        """Sum over all tasks, which the tuner gets."""
        return sum(task.message_bytes for task in self.tasks)


class Completing(Protocol):
    """The part of `Communicator` that a call uses."""

    rendezvous: Rendezvous

    def is_ready(self, call: IssuedCall) -> bool:
        """Whether every rank has issued it."""

    def complete(self, call: IssuedCall, timeout_us: int | None = None) -> float:
        """Take the results; returns the call's virtual end in microseconds."""


@dataclass(slots=True, eq=False)
class IssuedCall:
    """Fused tasks that were issued."""

    communicator: Completing
    index: int
    fused: FusedTasks
    message_bytes: int
    own_arrival_us: float
    candidate: Candidate
    duration_us: float = 0.0
    """Without contention, with noise; equal on all ranks."""
    n_channels: int = 0
    """Channels of the device that the kernel holds."""
    events: list[int] = field(default_factory=list)
    """The profiler's handles of events that wait for the kernel."""
    end_us: float | None = None
    error: BaseException | None = None

    @property
    def rendezvous(self) -> Rendezvous:
        """Holds all ranks' payloads while the call completes."""
        return self.communicator.rendezvous
