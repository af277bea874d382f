"""Times this rank's steps, and reports the plan under which their calls ran.

At the end of a step the training thread only notes an instant of the training clock. The step is reported once the
device has reached that instant, which may be some steps later. Optimizer steps that exchange nothing (local SGD,
DiLoCo) are part of the next step that does.
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
"""Number of steps that stands for all steps."""


class StepCounter(Protocol):
    """The part of `zerotune.agent.nccl.library.Plugin` that steps need."""

    def set_step(self, step: int) -> int:
        """Begin step `step`; returns the epoch under which the calls of the previous step ran."""

    def set_observing(self, on: bool) -> None:
        """Turn timed records on or off."""

    def set_capturing(self, on: bool) -> None:
        """A graph's capture begins or has ended."""


class _End(NamedTuple):
    """The end of a step on the host."""

    step: int
    epoch: int
    instant: Instant | None
    pressure: float | None
    is_whole: bool


class StepTimer:
    """Only one thread calls `finish`: the training thread, or the session's if steps are not seen.

    Args:
        plugin: counts steps; None: they are only timed.
        on_lost: called for each step whose time is unknown.
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
        """False after a graph was replayed: NCCL does not ask the tuner for calls in graphs."""
        self.pressure: float | None = None
        self._noted: deque[_End] = deque()
        self._reporting = threading.Lock()
        self._last: _End | None = None
        """The newest end that the device has reached; None: unknown."""
        self._epoch = 0
        self._n_observed = 0
        self._has_called = False
        self.step = 0
        """Number of the step under way; 0 before the first end of a step."""

    def count_by(self, counter: StepCounter) -> None:
        """Count with `counter`, in a process without a plugin."""
        self._plugin = counter

    def observe(self, n_steps: int) -> None:
        """Turn timed records on for `n_steps` steps; 0: off."""
        self._n_observed = n_steps
        self._set_observing()

    def capture(self, is_on: bool) -> None:
        """No call is timed while a graph is captured: NCCL would add the timing work to the graph for good."""
        if self._plugin is not None:
            self._plugin.set_capturing(is_on)

    def _set_observing(self) -> None:
        if self._plugin is not None:
            self._plugin.set_observing(self._n_observed > 0)

    def finish(self, *, is_step: bool = True) -> None:
        """A step was enqueued, or an interval has ended in a job whose steps are not seen."""
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
            self.report_ended()
        if len(self._noted) < MAX_UNDERWAY:  # else the clock would reuse an event that is not read yet
            whole = is_step and not is_mixed
            self._noted.append(_End(self.step, self._epoch, self.clock.note(), self.pressure, whole))
        else:
            self._on_lost()
        self.step += 1
        if self.clock.training_thread_only:
            self.report_ended()
        if self._n_observed:
            self._n_observed -= 1
            if self._n_observed == 0:
                self._set_observing()

    def report_from_other_thread(self) -> None:
        """`report_ended` from another thread; does nothing if only the training thread may read the clock."""
        if not self.clock.training_thread_only:
            self.report_ended()

    def report_ended(self, *, is_last: bool = False) -> None:
        """Report the steps whose ends the device has reached by now; never waits for it.

        `is_last` drops the steps whose ends it has not reached.
        """
        with self._reporting:
            while self._noted:
                end = self._noted[0]
                is_reached = end.instant is None or end.instant.is_reached()
                if not (is_reached or is_last):
                    return
                self._noted.popleft()
                began, self._last = self._last, end if is_reached else None
                if end.step:
                    self._report_step(began, end)

    def _report_step(self, began: _End | None, end: _End) -> None:
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
