"""When NCCL's own choice runs again beside what is in force, so that a gain is a difference of neighbouring steps.

A *control window* is two steps with no rows at all, with four steps on either side in which nothing is on trial. The
first ones come soon, as nothing is told from fewer than four: if steps are so short that a plan runs for many of them,
one plan has several. Later ones get rarer, and none comes before what all of them have lost is paid for.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Final

from ....store.records import MAX_STAGES
from ....store.step_times import LEAST_BLOCKS, NEIGHBOURS
from .risk import FIRST_LOOK_STEPS

FIRST_GAP: Final = 7.0
"""Steps from the first windows' last neighbours to the next one's first, on average: trials go on in these."""

APART: Final = 2 * NEIGHBOURS
"""Steps between two windows of one plan at least: each has neighbours of its own."""

UNKNOWN_GAIN: Final = 0.1
"""Share of step time that a window is taken to lose as long as no window tells: large, so that windows do not go on."""


class ControlWindows:
    """Says when the next one is due. Pure: its chance has a seed.

    Args:
        share: of step time that they may lose; 0: there are none.
        seed: of the gaps, which training's own periods must not meet.
        compare_steps: so many steps of windows and their neighbours come soon, whatever they lose.
    """

    def __init__(self, share: float, seed: int = 0, compare_steps: int = 0) -> None:
        self._share = share
        # Of the usual ones some may have no neighbours.
        self._n_first = max(LEAST_BLOCKS + LEAST_BLOCKS // 2, compare_steps // (2 * NEIGHBOURS + FIRST_LOOK_STEPS))
        self._chance = random.Random(seed)
        self._n_windows = 0
        self._due = 0.0
        self._usual: Hashable = ()
        self._n_waits = 0

    def is_due(self, step: int) -> bool:
        """Whether one should begin at `step`, if something is in force that it can be compared with."""
        return self._share > 0.0 and step >= self._due

    def put_off(self, step: int, window_steps: float = 1.0) -> None:
        """There is nothing to compare with, or it must not be; a plan runs for `window_steps` at least."""
        self._due = step + max(FIRST_GAP, 2.0 * window_steps) * self._chance.uniform(0.5, 1.5)

    def is_calm(self, step: int, usual: Hashable, window_steps: float = 1.0) -> bool:
        """Whether what is `usual` is what it was at the last look, or that was waited for long enough; else it waits.

        While a job begins more and more is in force: windows of then would tell different gains.

        Args:
            usual: what is in force when nothing is on trial.
            window_steps: how long a plan runs at least.

        Returns:
            True: one may begin now.
        """
        if usual == self._usual or self._n_waits == 2 * LEAST_BLOCKS:
            self._usual, self._n_waits = usual, 0
            return True
        self._usual, self._n_waits = usual, self._n_waits + 1
        self.put_off(step, window_steps)
        return False

    def begun(self, step: int, gain: float | None, window_steps: float = 1.0) -> list[int]:
        """One begins at `step`, and others may follow in the same plan.

        Args:
            gain: share of a step's time under NCCL's own choice that what is in force saves; None: not known yet.
            window_steps: how long a plan runs at least before the next one: trials shall have most of these.

        Returns:
            Steps from the end of each window of the plan to the next one's beginning.
        """
        fit = int(window_steps) // (APART + FIRST_LOOK_STEPS)
        room = min(self._n_first - self._n_windows, fit, MAX_STAGES // 2 - 1)
        gaps = [APART + self._chance.randrange(NEIGHBOURS) for _ in range(1, room)]
        self._n_windows += 1 + len(gaps)
        lost_share = UNKNOWN_GAIN if gain is None else max(gain, 0.0)
        lost_steps = (self._n_windows + 1) * FIRST_LOOK_STEPS * lost_share  # with the next one
        is_first, rarer = self._n_windows < self._n_first, self._n_windows / self._n_first
        paid_at = 0.0 if is_first else lost_steps / self._share
        gap = max(FIRST_GAP, 2.0 * window_steps) if is_first else max(FIRST_GAP, 4.0 * window_steps) * rarer
        takes_steps = 2 * NEIGHBOURS + sum(gaps) + (1 + len(gaps)) * FIRST_LOOK_STEPS
        self._due = max(step + takes_steps, paid_at) + gap * self._chance.uniform(0.5, 1.5)
        return gaps
