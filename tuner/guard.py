"""The last word belongs to the step time: a plan that makes training slower is rolled back.

A one-sided CUSUM (Page 1954) on log step times against the median of the steps before the plan changed.
With 1 % noise and a 2 % slowdown it fires after about five steps. Collectives that got faster on their own
but slow computation down show up here and nowhere else. An alarm says since when steps have been slower, so
that only the plan adopted then answers for it; and if steps do not recover once it is withdrawn, it was
not the plan, and it is reinstated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

REFERENCE_STEPS: Final = 40
MIN_REFERENCE: Final = 4
MIN_OWN_NOISE: Final = 12
"""Steps after which the reference may speak for its own noise."""
SLOWDOWN: Final = 0.02
"""Slowdown (log) that must not go unnoticed."""
LIMIT: Final = 4.5
"""Alarm when the sum of excesses passes this many noise scales."""
NOISE_FLOOR: Final = 0.004
WATCH_STEPS: Final = 60
"""Steps after a change for which it is still held responsible."""
RECOVERY_STEPS: Final = 8


class Alarm(NamedTuple):
    """Steps have been `percent` slower for the last `n_steps` steps."""

    percent: float
    n_steps: int


class Guard:
    """Watches one job's steps: `changed` opens a watch, `step` answers with an alarm or None."""

    def __init__(self, slowdown: float = SLOWDOWN) -> None:
        self._slowdown = slowdown
        self._centre: float | None = None
        self._sigma = 0.01
        self._watch_steps = WATCH_STEPS
        self._doubt = 0.0
        """Standard error of the yardstick, in noise scales: few steps make a poor one."""
        self._sum = 0.0
        self._n_watched = 0
        self._run: list[float] = []
        """Steps since the sum was last zero."""
        self._slow_centre: float | None = None
        self._recovery: list[float] = []

    @property
    def is_watching(self) -> bool:
        """True while a change is under watch."""
        return self._centre is not None

    def changed(self, reference_us: Sequence[float], watch_steps: int = WATCH_STEPS) -> None:
        """From the next step on a newly promoted plan is in force.

        `reference_us` are recent steps that ran without what was promoted, the newest last. Steps of its
        trial windows must not be among them, or a slow candidate would be its own yardstick.
        """
        self.settled()
        values = np.log([one for one in reference_us[-REFERENCE_STEPS:] if one > 0])
        if len(values) < MIN_REFERENCE:
            return
        self._watch_steps = watch_steps
        self._doubt = 1.0 / math.sqrt(len(values))
        self._centre = float(np.median(values))
        spread = 1.4826 * float(np.median(np.abs(values - self._centre)))
        # A handful of steps cannot tell its own noise: lean on what was known before.
        share = min(1.0, len(values) / MIN_OWN_NOISE)
        self._sigma = max(NOISE_FLOOR, share * spread + (1.0 - share) * max(spread, self._sigma))

    def changed_again(self) -> None:
        """Another plan came while the last one is under watch: both answer to the same yardstick, for longer."""
        self._n_watched = 0

    def step(self, duration_us: float) -> Alarm | None:
        """One finished step, without what known exploration cost in it."""
        if not duration_us > 0:
            return None
        log_us = math.log(duration_us)
        if self._slow_centre is not None:
            self._recovery.append(log_us)
        if self._centre is None:
            return None
        self._n_watched += 1
        excess = (log_us - self._centre) / self._sigma
        half = 0.5 * self._slowdown / self._sigma
        allowance = half + self._doubt
        # One straggling step must not pass for a slow plan.
        self._sum = max(0.0, self._sum + min(excess - allowance, 0.35 * LIMIT + allowance))
        self._run = [*self._run, log_us] if self._sum > 0 else []
        if self._sum > max(LIMIT, 3.0 * half):
            slow = float(np.median(self._run))
            return Alarm(100.0 * (math.exp(slow - self._centre) - 1.0), len(self._run))
        if self._n_watched >= self._watch_steps:
            self.settled()
        return None

    def settled(self) -> None:
        """The watch is over: what ran lately is the new normal."""
        self._centre = None
        self._sum = 0.0
        self._n_watched = 0
        self._run = []

    def rolled_back(self) -> None:
        """The plan is withdrawn; from the next step on it is watched whether steps recover."""
        self._slow_centre = float(np.median(self._run)) if self._run else None
        self._recovery.clear()
        self.settled()

    def recovered(self) -> bool | None:
        """After a roll-back: True when steps became faster again, False when not, None while unknown."""
        if self._slow_centre is None or len(self._recovery) < RECOVERY_STEPS:
            return None
        # The first steps may still have run under the plan that is being withdrawn.
        gained = self._slow_centre - float(np.median(self._recovery[RECOVERY_STEPS // 3 :]))
        self._slow_centre = None
        return gained > 0.4 * self._slowdown
