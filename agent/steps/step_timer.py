"""Times this rank's steps and says which plan their calls ran under. Its methods run where a step ends.

A step is told once the device has reached its end, which may be some steps later, with the plan under which its own
calls were enqueued. Optimizer steps that exchange nothing (local SGD, DiLoCo) are part of the next one that does: the
round is what repeats.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from zerotune.agent.nccl.library import MIXED_EPOCHS, NO_CALLS
from zerotune.agent.steps.clock import MAX_UNDERWAY, Instant, TrainingClock, WallClock
from zerotune.store.records import StepRecord


class StepCounter(Protocol):
    """The part of `zerotune.agent.nccl.library.Plugin` that steps need."""

    def set_step(self, step: int) -> int:
        """A step has ended: the epoch that its calls ran under."""

    def set_observing(self, on: bool) -> None:
        """Turn timed records on or off."""


class _Enqueued(NamedTuple):
    """A step that the host has enqueued."""

    step: int
    epoch: int
    began: Instant | None
    ended: Instant | None
    pressure: float | None
    is_whole: bool


class StepTimer:
    """Used by the thread on which steps end: training's, or the session's own in a job whose steps nobody sees.

    Args:
        plugin: counts steps; None: they are only timed.
        sinks: each is given every finished step.
        on_lost: is called for each step whose time is not known.
    """

    def __init__(
        self,
        plugin: StepCounter | None,
        *sinks: Callable[[StepRecord], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._plugin = plugin
        self.sinks = list(sinks)
        self._on_lost = on_lost
        self.clock: TrainingClock = WallClock()
        self.sees_all_calls = True
        """NCCL is asked at each call. It is not if a graph is replayed."""
        self.pressure: float | None = None
        self._began: Instant | None = None
        self._come: Instant | None = None
        """The newest one that is known to have come."""
        self._underway: deque[_Enqueued] = deque()
        self._epoch = 0
        self._n_observed = 0
        self._has_called = False
        self.step = 0
        """Number of the step under way; 0 before the first end of a step."""

    def observe(self, n_steps: int) -> None:
        """Turn timed records on for `n_steps` steps; 0: off."""
        self._n_observed = n_steps
        if self._plugin is not None:
            self._plugin.set_observing(n_steps > 0)

    def finish(self, *, is_step: bool = True) -> None:
        """A step has been enqueued, or an interval has ended in a job whose steps are not seen."""
        ran_under = self._plugin.set_step(self.step + 1) if self._plugin is not None else NO_CALLS
        has_called = ran_under != NO_CALLS
        is_local = is_step and not has_called and self.sees_all_calls and self._plugin is not None
        if is_local and self._has_called and self._plugin is not None:
            self._plugin.set_step(self.step)
            return
        self._has_called |= has_called
        if len(self._underway) >= MAX_UNDERWAY:
            self.settle()
        has_room = len(self._underway) < MAX_UNDERWAY  # else an event that is not read yet would be taken again
        now = self.clock.note() if has_room else None
        is_mixed = has_called and ran_under >= MIXED_EPOCHS
        if has_called and ran_under:
            self._epoch = ran_under % MIXED_EPOCHS
        if self.step and not has_room:
            self._on_lost()
        elif self.step:
            whole = is_step and not is_local and not is_mixed
            self._underway.append(_Enqueued(self.step, self._epoch, self._began, now, self.pressure, whole))
        self._began = now
        self.step += 1
        self.settle()
        if self._n_observed:
            self._n_observed -= 1
            if self._n_observed == 0 and self._plugin is not None:
                self._plugin.set_observing(False)

    def settle(self, *, is_last: bool = False) -> None:
        """Tell the steps whose ends the device has reached by now; never waits.

        Args:
            is_last: those that it has not reached are given up.
        """
        while self._underway:
            step, epoch, began, ended, pressure, is_whole = self._underway[0]
            duration_us, exposed_us = math.nan, None
            if began is not None and ended is not None and type(began) is type(ended):
                if ended.has_come() and (began is self._come or began.has_come()):
                    self._come = ended
                    duration_us, exposed_us = ended.us_since(began), ended.exposed_since(began)
                elif not is_last:
                    return
            self._underway.popleft()
            if math.isnan(duration_us):
                self._on_lost()
                continue
            record = StepRecord(step, epoch, duration_us, exposed_us, pressure, is_whole)
            for sink in self.sinks:
                sink(record)
