"""What it cost to connect algorithms that had not run before.

NCCL from 2.22 on connects an algorithm for a communicator at its first use. Where durations are taken on the host that
first call shows it; where kernels are timed only the step does, which waits all the same. Both are exploration's cost,
and say nothing about the setting.
"""

from __future__ import annotations

from statistics import median
from typing import Final

from zerotune.tuner.learning.policy.trials.budget import Budget

MOST_OPEN: Final = 64
"""Steps of which no record has come."""
LEAST_SHARE: Final = 0.1
"""A step that connects something took longer for that by this much of its time at least; less may be noise."""
ENOUGH_STEPS: Final = 4
"""So many steps say how long one usually takes."""


class Connections:
    """Charges the budget what steps say of them, and remembers how much a connection takes."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._charged_us: dict[int, float] = {}
        """What the calls that connected something were charged, by step, until the step's record is here."""
        self._total_us, self._n = 0.0, 0

    @property
    def typical_us(self) -> float:
        """What training waits for one, as far as seen; 0 before the first."""
        return self._total_us / self._n if self._n else 0.0

    def made(self, step: int, charged_us: float) -> None:
        """Calls of `step` connected something, and were charged `charged_us` for what they took longer."""
        if step not in self._charged_us:
            self._n += 1
        self._charged_us[step] = self._charged_us.get(step, 0.0) + charged_us
        self._total_us += charged_us
        while len(self._charged_us) > MOST_OPEN:
            del self._charged_us[next(iter(self._charged_us))]

    def finished(self, step: int, left_us: float, usual_us: list[float]) -> bool:
        """Whether a step connected something; what it took longer besides what calls were charged is charged now.

        Args:
            step: the step.
            left_us: its duration without what exploration is known to have added.
            usual_us: durations of other steps.

        Returns:
            True if the step connected something.
        """
        if self._charged_us.pop(step, None) is None:
            return False
        if len(usual_us) >= ENOUGH_STEPS:
            usual = median(usual_us)
            if left_us - usual > LEAST_SHARE * usual:
                self._budget.spend(left_us - usual)
                self._total_us += left_us - usual
        return True
