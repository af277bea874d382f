"""Ended steps and adopted plans, which the training thread queues for the channel's thread.

The queue fills from the first step on, before the job's start is agreed. It is bounded, and dropped steps are counted.
"""

from __future__ import annotations

from collections import deque
from typing import Final, TypeVar

from ...store.records import StepRecord

Item = TypeVar("Item")

MAX_QUEUED: Final = 4096
"""If more steps wait, the oldest are dropped."""


class StepQueue:
    """One thread adds, another one takes."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=MAX_QUEUED)
        self._adopted: deque[tuple[int, int]] = deque(maxlen=MAX_QUEUED)
        self.n_lost = 0
        """Steps that were dropped, or whose time is not known."""

    def add(self, step: StepRecord) -> None:
        """A step has ended."""
        if len(self._steps) == MAX_QUEUED:
            self.lose()
        self._steps.append(step)

    def lose(self) -> None:
        """A step has ended whose time is unknown."""
        self.n_lost += 1

    def adopt(self, epoch: int, step: int) -> None:
        """`epoch` is in force from `step` on."""
        self._adopted.append((epoch, step))

    def take_steps(self) -> list[StepRecord]:
        """Steps that ended since the last call, oldest first."""
        return _taken(self._steps)

    def take_adopted(self) -> list[tuple[int, int]]:
        """(epoch, step) of the plans adopted since the last call, oldest first."""
        return _taken(self._adopted)


def _taken(queue: deque[Item]) -> list[Item]:
    taken = []
    while queue:
        taken.append(queue.popleft())
    return taken
