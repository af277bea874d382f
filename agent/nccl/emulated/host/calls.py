"""What is issued: tasks, tasks fused under one decision, and calls on their way through a communicator."""

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
"""Collectives that NCCL chooses a setting for; the others are made of sends and receives."""

NO_SETTING: Final = 255
"""Algorithm and protocol, in headers and to the profiler, of what has none."""

Finish = Callable[["IssuedCall", int], None]


class Path(IntEnum):
    """How NCCL carries a collective out; only the first asks the tuner."""

    kernel = 0
    symmetric = 1
    """A kernel over registered windows."""
    copy_engine = 2
    """No kernel at all."""


@dataclass(slots=True)
class Task:
    """One collective of a group: what this rank sends, and what to do with what all ranks sent."""

    piece: torch.Tensor | None
    """Contiguous CPU tensor, copied at issue; None = nothing to send."""
    message_bytes: int
    """Total, NCCL's nBytes."""
    count: int
    """NCCL's count argument."""
    finish: Finish | None
    """Called with the call and this task's piece number once every rank's data is there."""
    output: torch.Tensor | None = None
    """The tensor that the caller sees filled."""
    root: int = 0
    """Rank, where there is one."""


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
        """Of all tasks together, as the tuner is told."""
        return sum(task.message_bytes for task in self.tasks)


class Completing(Protocol):
    """What a call needs from the communicator that issued it."""

    rendezvous: Rendezvous

    def is_ready(self, call: IssuedCall) -> bool:
        """Whether every rank has issued it."""

    def complete(self, call: IssuedCall, timeout_us: int | None = None) -> float:
        """Take the results; returns when it ended on the virtual clock, in microseconds."""


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
    """Alone on the links, with noise; alike on all ranks."""
    n_channels: int = 0
    """Channels of the device that the kernel holds."""
    events: list[int] = field(default_factory=list)
    """The profiler's handles of events that wait for the kernel."""
    end_us: float | None = None
    error: BaseException | None = None

    @property
    def rendezvous(self) -> Rendezvous:
        """Where all ranks' payloads are while the call completes."""
        return self.communicator.rendezvous
