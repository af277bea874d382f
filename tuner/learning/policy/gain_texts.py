"""Gains in words, for the reasons of decisions."""

from __future__ import annotations

import math
from typing import Final

Z_90: Final = 1.645
"""Standard deviations to either side that hold 90 %."""


def comparison(gain: float) -> str:
    """A gain (log ratio of durations) in words: how much less time than the other it takes, or how much more."""
    if gain < 0:
        return f"{100.0 * math.expm1(-gain):.1f} % slower"
    return f"{saved(gain)} faster"


def saved(gain: float) -> str:
    """The share of time that a gain (log) saves."""
    return f"{-100.0 * math.expm1(-gain):.1f} %"
