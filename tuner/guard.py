"""The last word belongs to the step time: a plan that makes training slower is rolled back.

A one-sided CUSUM on log step times against the median of the steps before the plan changed (Page 1954).
With 1 % noise and a 2 % slowdown it fires after about five steps; without a slowdown less than once in ten
thousand steps. Collectives that got faster on their own but slow down computation show up here and nowhere
else.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import numpy as np

REFERENCE_STEPS: Final = 40
MIN_REFERENCE: Final = 5
SLOWDOWN: Final = 0.02
"""Slowdown (log) that must not go unnoticed."""
LIMIT: Final = 4.0
"""Alarm when the sum of excesses passes this many noise scales."""
NOISE_FLOOR: Final = 0.004
WATCH_STEPS: Final = 60
"""Steps after a change for which it is still held responsible."""


class Guard:
    """Watches one job's steps; `changed` opens a watch, `step` says whether to roll back."""

    def __init__(self, slowdown: float = SLOWDOWN) -> None:
        self._slowdown = slowdown
        self._reference: deque[float] = deque(maxlen=REFERENCE_STEPS)
        self._watched: deque[float] = deque(maxlen=WATCH_STEPS)
        self._centre: float | None = None
        self._sigma = 0.01
        self._sum = 0.0

    @property
    def is_watching(self) -> bool:
        """True while a change is under watch."""
        return self._centre is not None

    @property
    def slowdown_percent(self) -> float:
        """By how much the watched steps are slower than the reference, in percent; 0 when not watching."""
        if self._centre is None or not self._watched:
            return 0.0
        return 100.0 * (math.exp(float(np.median(self._watched)) - self._centre) - 1.0)

    def changed(self) -> None:
        """From the next step on a newly promoted plan is in force."""
        if self._centre is not None:
            # Two changes under one watch: both answer for it, against the reference before the first.
            return
        if len(self._reference) < MIN_REFERENCE:
            return
        values = np.array(self._reference)
        self._centre = float(np.median(values))
        spread = 1.4826 * float(np.median(np.abs(values - self._centre)))
        self._sigma = max(NOISE_FLOOR, spread)
        self._sum = 0.0
        self._watched.clear()

    def step(self, duration_us: float) -> bool:
        """One finished step; True = the watched plan makes training slower, roll it back."""
        if not duration_us > 0:
            return False
        log_us = math.log(duration_us)
        if self._centre is None:
            self._reference.append(log_us)
            return False
        self._watched.append(log_us)
        excess = (log_us - self._centre) / self._sigma
        allowance = 0.5 * self._slowdown / self._sigma
        # One straggling step must not pass for a slow plan.
        self._sum = max(0.0, self._sum + min(excess - allowance, 0.4 * LIMIT + allowance))
        if self._sum > max(LIMIT, 3.0 * allowance):
            return True
        if len(self._watched) >= WATCH_STEPS:
            self.settled()
        return False

    def settled(self) -> None:
        """The watch is over: what ran lately is the new normal."""
        self._reference.clear()
        self._reference.extend(list(self._watched)[-REFERENCE_STEPS:])
        self._watched.clear()
        self._centre = None

    def rolled_back(self) -> None:
        """The plan is withdrawn: the reference from before it holds again."""
        self._watched.clear()
        self._centre = None
