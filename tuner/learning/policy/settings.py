"""What a user may want to change about how bold the policy is."""

from __future__ import annotations

from typing import NamedTuple


class PolicySettings(NamedTuple):
    """Shares of time unless the unit is named; gains are logs of ratios of durations."""

    false_promotion: float = 0.01
    min_gain: float = 0.005
    worthwhile: float = 0.003
    catastrophic_ratio: float = 2.0
    steps_per_window: float = 1.0
    """A setting on trial is believed to run for no fewer steps before it can be withdrawn."""
