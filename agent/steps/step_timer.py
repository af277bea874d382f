"""Times this rank's steps and says which plan their calls ran under.

Where a step ends the training thread only notes it. A step is told once the device has reached its end, which may be
some steps later, with the plan under which its own calls were enqueued. Optimizer steps that exchange nothing (local
SGD, DiLoCo) are part of the next one that does: the round is what repeats.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from ...store.records import StepRecord
from ..nccl.library import MIXED_EPOCHS, NO_CALLS
from .clock import MAX_UNDERWAY, Instant, TrainingClock, WallClock

ALWAYS: Final = sys.maxsize
"""Steps in which calls are timed if they always are."""


class StepCounter(Protocol):
    """The part of `zerotune.agent.nccl.library.Plugin` that steps need."""

    def set_step(self, step: int) -> int:
        """A step has ended: the epoch that its calls ran under."""

    def set_observing(self, on: bool) -> None:
        """Turn timed records on or off."""

    def set_capturing(self, on: bool) -> None:
        """A graph is captured from now on, or not any more."""


class _End(NamedTuple):
    """Where the host has ended a step."""

    step: int
    epoch: int
    instant: Instant | None
    pressure: float | None
    is_whole: bool


class StepTimer:
    """`finish` belongs to the thread on which steps end: training's, or the session's own if nobody sees steps.

    Args:
        plugin: counts steps; None: they are only timed.
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
        self._noted: deque[_End] = deque()
        self._telling = threading.Lock()
        self._last: _End | None = None
        """The newest one that is known to have come."""
        self._epoch = 0
        self._n_observed = 0
        self._has_called = False
        self.step = 0
        """Number of the step under way; 0 before the first end of a step."""

    def count_by(self, counter: StepCounter) -> None:
        """Say of a process without a plugin, too, which steps exchange something."""
        self._plugin = counter

    def observe(self, n_steps: int) -> None:
        """Turn timed records on for `n_steps` steps; 0: off."""
        self._n_observed = n_steps
        self._set_observing()

    def capture(self, is_on: bool) -> None:
        """While a graph is captured no call is timed: for that NCCL would put work into the graph for good."""
        if self._plugin is not None:
            self._plugin.set_capturing(is_on)

    def _set_observing(self) -> None:
        if self._plugin is not None:
            self._plugin.set_observing(self._n_observed > 0)

    def finish(self, *, is_step: bool = True) -> None:
        """A step has been enqueued, or an interval has ended in a job whose steps are not seen."""
        ran_under = NO_CALLS if self._plugin is None else self._plugin.set_step(self.step + 1)
        is_mixed = False
        if ran_under != NO_CALLS:
            self._has_called, is_mixed = True, ran_under >= MIXED_EPOCHS
            self._epoch = ran_under % MIXED_EPOCHS or self._epoch
        elif is_step and self.sees_all_calls and self._plugin is not None:  # it exchanged nothing
            if self._has_called:
                self._plugin.set_step(self.step)
                return
            is_step = False
        if len(self._noted) >= MAX_UNDERWAY:
            self.settle()
        if len(self._noted) < MAX_UNDERWAY:  # else an event that is not read yet would be taken again
            whole = is_step and not is_mixed
            self._noted.append(_End(self.step, self._epoch, self.clock.note(), self.pressure, whole))
        else:
            self._on_lost()
        self.step += 1
        if self.clock.is_trainings:
            self.settle()
        if self._n_observed:
            self._n_observed -= 1
            if self._n_observed == 0:
                self._set_observing()

    def tell(self) -> None:
        """`settle` for any other thread; if only training's may read the clock, that one does it."""
        if not self.clock.is_trainings:
            self.settle()

    def settle(self, *, is_last: bool = False) -> None:
        """Tell the steps whose ends the device has reached by now; never waits for it.

        Args:
            is_last: those that it has not reached are given up.
        """
        with self._telling:
            while self._noted:
                end = self._noted[0]
                has_come = end.instant is None or end.instant.has_come()
                if not (has_come or is_last):
                    return
                self._noted.popleft()
                began, self._last = self._last, end if has_come else None
                if end.step:
                    self._tell_step(began, end)

    def _tell_step(self, began: _End | None, end: _End) -> None:
        duration_us, exposed_us = math.nan, None
        if began is not None and began.step == end.step - 1 and self._last is end:
            since, now = began.instant, end.instant
            if since is not None and now is not None and type(since) is type(now):
                duration_us, exposed_us = now.us_since(since), now.exposed_since(since)
        if not duration_us >= 0:
            self._on_lost()
            return
        record = StepRecord(end.step, end.epoch, duration_us, exposed_us, end.pressure, end.is_whole)
        for sink in self.sinks:
            sink(record)
