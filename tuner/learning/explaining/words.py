"""What the policy says of gains and predictions, in words for people."""

from __future__ import annotations

import math
from typing import Final

from zerotune.store.records import Candidate

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


def saved_with_doubt(gain: float, doubt: float) -> str:
    """The share of time that a gain (log) saves, and the standard deviation of that."""
    return f"{saved(gain)} faster than the baseline (give or take {100.0 * doubt:.1f})"


def predicted(log_us: float, std: float, usual_us: float, usual: Candidate) -> str:
    """Why something is tried.

    Args:
        log_us: what it should take, log microseconds.
        std: standard deviation of that (log).
        usual_us: what takes turns with it takes.
        usual: that setting.

    Returns:
        A clause for the reason.
    """
    low, high = math.exp(log_us - Z_90 * std), math.exp(log_us + Z_90 * std)
    return f"predicted {math.exp(log_us):.1f} us (90 %: {low:.1f} to {high:.1f}) against {usual_us:.1f} us of {usual}"


def slower_steps(percent: float, n_others: int, n_with: int, n_without: int) -> str:
    """Why something is withdrawn for what it does to steps.

    Args:
        percent: by how much steps were slower with it.
        n_others: settings that ran at the same time.
        n_with: steps with it that were compared.
        n_without: steps without it.

    Returns:
        A clause for the reason.
    """
    others = f" and {n_others} more that ran at the same time" if n_others else ""
    counts = f"({n_with} steps against {n_without}, compared in turns)"
    return f"steps were {percent:.1f} % slower with it{others} than without {counts}"
