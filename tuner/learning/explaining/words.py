"""Gains and predictions of the policy in words for people."""

from __future__ import annotations

import math
from typing import Final

from ....store.records import Candidate

Z_90: Final = 1.645
"""Standard deviations to either side that hold 90 %."""


def comparison(gain: float) -> str:
    """A gain (log ratio of durations) in words: how much faster or slower."""
    if gain < 0:
        return f"{100.0 * math.expm1(-gain):.1f} % slower"
    return f"{saved(gain)} faster"


def saved(gain: float) -> str:
    """The share of time that a gain (log) saves."""
    return f"{-100.0 * math.expm1(-gain):.1f} %"


def saved_with_doubt(gain: float, doubt: float) -> str:
    """The share of time that a gain (log) saves, and its standard deviation."""
    return f"{saved(gain)} faster than the baseline (give or take {100.0 * doubt:.1f})"


def predicted(log_us: float, std: float, usual_us: float, usual: Candidate) -> str:
    """A clause for the reason of a trial whose duration is predicted as `log_us`, log microseconds."""
    low, high = math.exp(log_us - Z_90 * std), math.exp(log_us + Z_90 * std)
    return f"predicted {math.exp(log_us):.1f} us (90 %: {low:.1f} to {high:.1f}) against {usual_us:.1f} us of {usual}"


def slower_steps(percent: float, n_others: int, n_with: int, n_without: int) -> str:
    """A clause for the reason to withdraw a setting: steps were `percent` slower with it."""
    others = f" and {n_others} more that ran at the same time" if n_others else ""
    counts = f"({n_with} steps against {n_without}, compared in turns)"
    return f"steps were {percent:.1f} % slower with it{others} than without {counts}"


def variant_ended(found: tuple[float, float] | None, cost_us: float, *, is_better: bool) -> str:
    """A clause with the outcome of a variant of the plan.

    `found` is by how much (log) steps were faster with it, and the standard deviation; None: no verdict.
    """
    if found is None:
        return f"given up without a verdict: it cost more than was expected; that cost {cost_us:,.0f} us"
    gain, doubt = found
    runs = "runs now" if is_better else "does not run"
    doubt_percent = 100.0 * Z_90 * doubt
    return (
        f"steps were {comparison(gain)} with it (90 %: give or take {doubt_percent:.1f}), so it {runs};"
        f" that cost {cost_us:,.0f} us"
    )


def pace(shift: float) -> str:
    """A clause that earlier steps are no reference any more, as training itself changed by `shift` (log)."""
    return f"training's own pace changed: steps take {math.exp(shift):.2f} times as long with the same settings"
