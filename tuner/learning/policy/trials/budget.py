"""How much training time exploration may cost, in measured microseconds."""

from __future__ import annotations

from typing import Final

PAID_WITHIN: Final = 20.0
"""What this many more steps will save counts as saved."""


class Budget:
    """Earns a fraction of every finished step, pays for what exploration cost over the incumbent."""

    def __init__(self, fraction: float) -> None:
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"budget fraction {fraction} is outside 0..1")
        self.fraction = fraction
        self.training_us = 0.0
        self.spent_us = 0.0
        self.n_steps = 0
        self._saved_us = self._saves_us = 0.0
        """So far, and per step."""
        self._saved_until = 0

    def earn(self, step_us: float) -> None:
        """A training step of `step_us` microseconds has finished."""
        self.training_us += step_us
        self.n_steps += 1

    def spend(self, extra_us: float) -> None:
        """Exploration cost `extra_us` over the incumbents; negative corrects an earlier charge."""
        self.spent_us = max(0.0, self.spent_us + extra_us)

    def save(self, per_step_us: float) -> None:
        """Steps since the last time were `per_step_us` shorter than with NCCL's own choices, according to calls."""
        self._saved_us += per_step_us * (self.n_steps - self._saved_until)
        self._saved_until, self._saves_us = self.n_steps, per_step_us

    @property
    def gained_us(self) -> float:
        """What exploration has gained, or soon will have, beside what it cost."""
        return self._saved_us + PAID_WITHIN * self._saves_us - self.spent_us

    @property
    def is_paid(self) -> bool:
        """Exploration has gained what it cost, or soon will have."""
        return self.gained_us > 0.0

    @property
    def remaining_us(self) -> float:
        """What may still be spent; negative after a costlier surprise than was planned for."""
        return self.fraction * self.training_us - self.spent_us

    @property
    def spent_percent(self) -> float:
        """Spent so far, in percent of training time."""
        return 100.0 * self.spent_us / self.training_us if self.training_us > 0 else 0.0
