"""Schedules control windows, so that a gain is a difference of neighbouring steps.

A *control window* is two steps with an empty plan, and four steps without trials on either side. The first windows
come soon, since no gain is reported from fewer than four. If a plan runs for many short steps, it has several windows.
Later ones are rarer: the next one waits until the allowed share of step time covers the loss of all.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Final

from ....store.records import MAX_STAGES
from ....store.step_times import LEAST_BLOCKS, NEIGHBOURS
from .risk import FIRST_LOOK_STEPS

FIRST_GAP: Final = 7.0
"""Mean number of steps between the neighbours of the first windows; trials go on in these steps."""

UNKNOWN_GAIN: Final = 0.1
"""Assumed loss of a window (share of step time) as long as no gain is known: large, so that windows stay rare."""


class ControlWindows:
    """Decides when the next control window is due. Deterministic: the random gaps have a seed.

    Gaps are random so that they do not match periods of the training. `share` is the share of step time that windows
    may lose; 0: no windows. `compare_steps` of windows and their neighbours come soon, whatever they lose.
    """

    def __init__(self, share: float, seed: int = 0, compare_steps: int = 0) -> None:
        self._share = share
        # Some of the first windows may have no neighbours.
        self._n_first = max(LEAST_BLOCKS + LEAST_BLOCKS // 2, compare_steps // (2 * NEIGHBOURS + FIRST_LOOK_STEPS))
        self._chance = random.Random(seed)
        self._n_windows = 0
        self._due = 0.0
        self._usual: Hashable = ()
        self._n_waits = 0

    def is_due(self, step: int) -> bool:
        """Whether a window should begin at `step`, if a plan is in force that it can be compared with."""
        return self._share > 0.0 and step >= self._due

    def put_off(self, step: int, window_steps: float = 1.0) -> None:
        """No comparison is possible or allowed now; a plan runs for at least `window_steps`."""
        self._due = step + max(FIRST_GAP, 2.0 * window_steps) * self._chance.uniform(0.5, 1.5)

    def is_calm(self, step: int, usual: Hashable, window_steps: float = 1.0) -> bool:
        """Whether a window may begin now: the `usual` settings are still the same, or the wait was long enough.

        While a job begins, more and more settings come into force: windows of that time would show different gains.

        `window_steps` are the least steps of a plan.
        """
        if usual == self._usual or self._n_waits == 2 * LEAST_BLOCKS:
            self._usual, self._n_waits = usual, 0
            return True
        self._usual, self._n_waits = usual, self._n_waits + 1
        self.put_off(step, window_steps)
        return False

    def begun(self, step: int, gain: float | None, window_steps: float = 1.0) -> list[int]:
        """A window begins at `step`; returns the steps from the end of each window of the plan to the next one.

        `gain` is the share of a step's time under NCCL's own choice that the plan saves; None: unknown. `window_steps`
        are the least steps of a plan. Trials must have most of the steps up to the next window.
        """
        apart = 2 * NEIGHBOURS  # each window has neighbours of its own
        room = min(self._n_first - self._n_windows, window_steps // (apart + FIRST_LOOK_STEPS), MAX_STAGES // 2 - 1)
        gaps = [apart + self._chance.randrange(NEIGHBOURS) for _ in range(1, int(room))]
        self._n_windows += 1 + len(gaps)
        lost_share = UNKNOWN_GAIN if gain is None else max(gain, 0.0)
        lost_steps = (self._n_windows + 1) * FIRST_LOOK_STEPS * lost_share  # including the next window
        is_first, rarer = self._n_windows < self._n_first, self._n_windows / self._n_first
        paid_at = 0.0 if is_first else lost_steps / self._share
        gap = max(FIRST_GAP, 2.0 * window_steps) if is_first else max(FIRST_GAP, 4.0 * window_steps) * rarer
        takes_steps = 2 * NEIGHBOURS + sum(gaps) + (1 + len(gaps)) * FIRST_LOOK_STEPS
        self._due = max(step + takes_steps, paid_at) + gap * self._chance.uniform(0.5, 1.5)
        return gaps
