"""Noticing that training itself has another pace: another batch size, other buckets, another stage.

Where the same settings take another time than they did a few steps ago, no plan is to blame: steps of before are no
yardstick any more for what is adopted. A change is believed when several steps in a row are off by far more than steps
scatter, all to the same side, and either one of them ran settings that had run before it, or they ran several that
never had while nothing was promoted: no single trial can be at work in all of these.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from statistics import median
from typing import Final, NamedTuple

MEMORY_STEPS: Final = 40
N_IN_A_ROW: Final = 3
"""One or two slow steps are stragglers: a checkpoint, a slow data loader."""
N_DIFFERENT: Final = 3
MOST_IN_DOUBT: Final = 8
"""After this many steps that nothing is comparable with, the guard decides."""
LEAST_SHIFT: Final = 0.04
"""Less (log) may be drift, or what settings do: that is left to the guard."""
NOISES: Final = 5.0


class _Step(NamedTuple):
    settings: Hashable
    n_promoted: int
    log_us: float
    log_unsaved_us: float
    shift: float
    """From steps with the same settings, or from all where there are none."""
    is_comparable: bool


class Pace:
    """One job's steps; `step` answers with the shift (log) where they have another pace, else None."""

    def __init__(self) -> None:
        self._known: deque[_Step] = deque(maxlen=MEMORY_STEPS)
        self._odd: list[_Step] = []
        """The newest steps, as long as all are off to one side."""

    @property
    def is_in_doubt(self) -> bool:
        """The newest steps are off, and it is open whether a plan may be to blame."""
        return bool(self._odd)

    def step(
        self, settings: Hashable, n_promoted: int, log_us: float, noise: float, log_unsaved_us: float | None = None
    ) -> float | None:
        """Take in one step.

        Args:
            settings: of its plan; equal for plans that ask the same.
            n_promoted: promotions so far.
            log_us: log duration.
            noise: standard deviation (log) of steps.
            log_unsaved_us: what the step would have taken without what its settings save according to calls; None: as
                `log_us`. Only what is off by both is another pace.

        Returns:
            The shift (log) when there is another pace.
        """
        log_unsaved_us = log_us if log_unsaved_us is None else log_unsaved_us
        alike = [one for one in self._known if one.settings == settings]
        is_comparable = bool(alike)
        shift = 0.0
        if yardstick := alike or self._known:
            measured = log_us - median(one.log_us for one in yardstick)
            unsaved = log_unsaved_us - median(one.log_unsaved_us for one in yardstick)
            shift = min(measured, unsaved, key=abs) if measured * unsaved > 0.0 else 0.0
        side = self._odd[0].shift if self._odd else shift
        self._odd.append(_Step(settings, n_promoted, log_us, log_unsaved_us, shift, is_comparable))
        if abs(shift) <= max(LEAST_SHIFT, NOISES * noise) or math.copysign(1.0, shift) != math.copysign(1.0, side):
            if len(self._odd) <= N_IN_A_ROW:
                # Steps that were off, where the next with their settings is not, straggled: they are no yardstick.
                self._odd[:-1] = [one for one in self._odd[:-1] if one.settings != settings]
            self._settle()
            return None
        comparable = [one for one in self._odd if one.is_comparable]
        unpromoted = [one for one in self._odd if one.n_promoted == self._known[-1].n_promoted]
        n_different = len({one.settings for one in unpromoted})
        if len(self._odd) >= N_IN_A_ROW and (comparable or n_different >= N_DIFFERENT):
            found = median(one.shift for one in comparable or unpromoted)
            self._known.clear()
            self._settle()
            return found
        if len(self._odd) >= MOST_IN_DOUBT:
            self._settle()
        return None

    def _settle(self) -> None:
        self._known.extend(self._odd)
        self._odd.clear()
