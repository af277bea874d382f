"""Times this rank's steps and says which plan their calls ran under. Its methods run where a step ends.

Optimizer steps that exchange nothing (local SGD, DiLoCo) are part of the next one that does: the round is what repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from zerotune.agent.nccl.library import MIXED_EPOCHS, NO_CALLS
from zerotune.agent.steps.clock import TrainingClock, WallClock
from zerotune.store.records import StepRecord


class StepCounter(Protocol):
    """The part of `zerotune.agent.nccl.library.Plugin` that steps need."""

    def set_step(self, step: int) -> int:
        """A step has ended: the epoch that its calls ran under."""

    def set_observing(self, on: bool) -> None:
        """Turn timed records on or off."""


class StepTimer:
    """Used by the thread on which steps end: training's, or the session's own in a job whose steps nobody sees.

    Args:
        plugin: counts steps; None: they are only timed.
        sinks: each is given every finished step.
    """

    def __init__(self, plugin: StepCounter | None, *sinks: Callable[[StepRecord], None]) -> None:
        self._plugin = plugin
        self.sinks = list(sinks)
        self.clock: TrainingClock = WallClock()
        self.sees_all_calls = True
        """NCCL is asked at each call. It is not if a graph is replayed."""
        self.pressure: float | None = None
        self._began_us = 0.0
        self._exposed_us: float | None = None
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
        """A step has ended, or an interval in a job whose steps are not seen."""
        ran_under = self._plugin.set_step(self.step + 1) if self._plugin is not None else NO_CALLS
        has_called = ran_under != NO_CALLS
        is_local = is_step and not has_called and self.sees_all_calls and self._plugin is not None
        if is_local and self._has_called and self._plugin is not None:
            self._plugin.set_step(self.step)
            return
        self._has_called |= has_called
        now_us, exposed_us = self.clock.now_us(), self.clock.exposed_us()
        is_mixed = has_called and ran_under >= MIXED_EPOCHS
        if has_called and ran_under:
            self._epoch = ran_under % MIXED_EPOCHS
        if self.step:
            exposed = None
            if exposed_us is not None and self._exposed_us is not None:
                exposed = exposed_us - self._exposed_us
            whole = is_step and not is_local and not is_mixed
            record = StepRecord(self.step, self._epoch, now_us - self._began_us, exposed, self.pressure, whole)
            for sink in self.sinks:
                sink(record)
        self._began_us, self._exposed_us = now_us, exposed_us
        self.step += 1
        if self._n_observed:
            self._n_observed -= 1
            if self._n_observed == 0 and self._plugin is not None:
                self._plugin.set_observing(False)
