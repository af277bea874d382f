"""Which share of communication time computation waits for, from what steps exposed and what their calls took."""

from __future__ import annotations

from typing import Final

import numpy as np

from zerotune.tuner.modeling.features import Floats, Ints

LEARNED: Final = 0.1
"""Weight of a step against those before it."""
MOST_OPEN: Final = 1024
"""Steps of which only the record, or only calls, are here."""


class ExposedShare:
    """Ratio of what steps exposed to what their calls took; a step of large messages weighs more than one of small.

    Calls and the record of a step may come in either order. A step of which calls were lost seems more exposed than
    it was: exploration is then charged too much, never too little.
    """

    def __init__(self) -> None:
        self._calls_us: dict[int, float] = {}
        self._exposed_us: dict[int, float] = {}
        self._newest_step = -1
        self._sums_us: tuple[float, float] | None = None

    @property
    def share(self) -> float:
        """Between 0 and 1; all is taken to be exposed until a step has said otherwise."""
        if self._sums_us is None:
            return 1.0
        exposed_us, calls_us = self._sums_us
        return min(1.0, exposed_us / calls_us)

    def measured(self, steps: Ints, duration_us: Floats) -> None:
        """Take in calls: step and duration of each, shape [n]."""
        distinct, of = np.unique(steps, return_inverse=True)
        for step, us in zip(distinct.tolist(), np.bincount(of, duration_us).tolist(), strict=True):
            self._calls_us[step] = self._calls_us.get(step, 0.0) + us
        self._newest_step = max(self._newest_step, int(distinct[-1]))
        self._learn()

    def finished(self, step: int, exposed_us: float) -> None:
        """Take in how long computation waited for communication in a finished step."""
        self._exposed_us[step] = exposed_us
        self._learn()

    def _learn(self) -> None:
        # Where calls or records are lost, only what came of the other kind piles up.
        fewer, more = sorted((self._exposed_us, self._calls_us), key=len)
        for step in [one for one in fewer if one < self._newest_step and one in more]:
            self._take(self._exposed_us.pop(step), self._calls_us.pop(step))
        for waiting in (self._calls_us, self._exposed_us):
            while len(waiting) > MOST_OPEN:
                del waiting[next(iter(waiting))]

    def _take(self, exposed_us: float, calls_us: float) -> None:
        exposed_us = min(max(exposed_us, 0.0), calls_us)
        if self._sums_us is None:
            self._sums_us = calls_us, calls_us
        exposed_before, calls_before = self._sums_us
        self._sums_us = (
            exposed_before + LEARNED * (exposed_us - exposed_before),
            calls_before + LEARNED * (calls_us - calls_before),
        )
