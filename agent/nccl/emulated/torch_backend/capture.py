"""CUDA graphs, as far as they concern NCCL: it chooses settings at the capture, and uses them at every replay.

    graph = Graph()
    with graph.capture():
        dist.all_reduce(tensor)       # the tuner is asked and the setting kept; nothing runs
    graph.replay()                    # runs with that setting, whatever the plan is by now

The profiler's mask is read at the capture, too. A graph captured while the profiler asks for no events is never timed;
a graph captured inside an observation window is timed at every replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._C._distributed_c10d import Work

from ..device import clock
from ..errors import EmulatedNcclError

if TYPE_CHECKING:
    from datetime import timedelta

    from .....store.records import Candidate
    from ..host.calls import FusedTasks, IssuedCall
    from ..host.communicator import Communicator

_capturing: Graph | None = None


def current() -> Graph | None:
    """The graph that is being captured."""
    return _capturing


def forbid(what: str) -> None:
    """Refuse `what` under capture; EmulatedNcclError."""
    if _capturing is not None:
        raise EmulatedNcclError(f"the emulated NCCL cannot capture {what} in a graph")


@dataclass
class _Group:
    communicator: Communicator
    fused_groups: list[tuple[FusedTasks, Candidate]]
    events: Any | None

    def issue(self) -> list[IssuedCall]:
        return self.communicator.replay(self.fused_groups, self.events)


class Graph:
    """Collectives, waits and computation in the order in which they were captured."""

    def __init__(self) -> None:
        self._nodes: list[_Group | int | float] = []
        """A group to issue, the number of a group to wait for, or microseconds of computation."""
        self._n_groups = 0

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Collectives issued inside become part of the graph and do not run."""
        self.capture_begin()
        try:
            yield self
        finally:
            self.capture_end()

    def capture_begin(self) -> None:
        """Begin a capture, as torch's CUDAGraph."""
        global _capturing
        forbid("a graph")
        _capturing, clock.current().recorder = self, self._nodes.append

    def capture_end(self) -> None:
        """End the capture."""
        global _capturing
        _capturing, clock.current().recorder = None, None

    def add(
        self,
        communicator: Communicator,
        fused_groups: Sequence[FusedTasks],
        n_tasks: int,
        outputs: Sequence[torch.Tensor],
    ) -> CapturedWork:
        """Choose the settings of one group for all replays, which fill the caller's `outputs`.

        The result is a handle: waiting for it during the capture becomes part of the graph. Errors are those of
        `Communicator.decide`.
        """
        decided = list(zip(fused_groups, communicator.decide(fused_groups, n_tasks, captured=True), strict=True))
        self._nodes.append(_Group(communicator, decided, communicator.begin_capture(decided)))
        self._n_groups += 1
        return CapturedWork(self, self._n_groups - 1, outputs)

    def wait(self, group: int) -> None:
        """The captured stream waits for a group."""
        self._nodes.append(group)

    def replay(self) -> None:
        """Run the graph; returns when the compute stream has waited for all collectives."""
        forbid("a replay")
        timeline = clock.current()
        groups: list[list[IssuedCall]] = []
        for node in self._nodes:
            if isinstance(node, _Group):
                groups.append(node.issue())
            elif isinstance(node, int):
                _join(timeline, groups[node])
            else:
                timeline.advance(node)
        for calls in groups:
            _join(timeline, calls)


class CapturedWork(Work):
    """Handle of a captured group: waiting for it becomes part of the graph."""

    def __init__(self, graph: Graph, group: int, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._graph, self._group, self._outputs = graph, group, outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The captured compute stream waits here; does nothing after the capture."""
        if _capturing is self._graph:
            self._graph.wait(self._group)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """False: nothing has run."""
        return False

    def result(self) -> list[torch.Tensor]:
        """The tensors that replays fill."""
        return list(self._outputs)

    def get_future(self) -> NoReturn:
        """Refused: a captured group has no future."""
        raise EmulatedNcclError("a captured collective has no future")


def _join(timeline: clock.Clock, calls: Sequence[Any]) -> None:
    for call in calls:
        timeline.wait_until(call.communicator.complete(call))
