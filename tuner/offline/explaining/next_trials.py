"""`zerotune explain --next`: the next trials of a job that continues, and their expected gain."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from ...learning.explaining.words import Z_90
from ...learning.policy.acquisition import WORTHWHILE
from ...learning.policy.observations import MIN_GAIN
from ...modeling.posterior import expected_improvement
from ..size_ranges import exact_range
from .values import Explanation
from .words import WIDE


class NextTrial(msgspec.Struct, frozen=True):
    """The most promising candidate of one key among those that this job never ran there."""

    collective: str
    phase: str
    min_bytes: int
    max_bytes: int
    setting: str
    now_us: float
    """Expected time of `setting`; `expected_us` is that of `candidate`."""
    candidate: str
    expected_us: float
    low_us: float
    """Lower bound of the 90 % interval of the candidate's time."""
    high_us: float
    worth_us: float
    """Expected improvement per step, with 0 for the case that the candidate is slower."""


def next_trials(explained: Sequence[Explanation]) -> list[NextTrial]:
    """The trials that are worth it by the policy's own rule, the most promising first."""
    return sorted((found for one in explained if (found := _best(one)) is not None), key=lambda one: -one.worth_us)


def _best(one: Explanation) -> NextTrial | None:
    us = {each["candidate"]: each["predicted_us"] for each in one.alternatives}
    now_us = us.get(one.setting)
    best: NextTrial | None = None
    for each in one.alternatives:
        low, high = each["predicted_low_us"], each["predicted_high_us"]
        if not now_us or each["n_this_job"] or None in (each["predicted_us"], low, high) or low <= 0:
            continue
        edge = math.log(now_us / each["predicted_us"]) - MIN_GAIN
        share = float(expected_improvement(edge, max(1e-6, math.log(high / low) / (2 * Z_90))))
        worth_us = share * now_us * (one.calls_per_step or 0.0)
        if share >= WORTHWHILE and (best is None or worth_us > best.worth_us):
            sizes = one.min_bytes, one.max_bytes
            now = one.setting, float(now_us)
            then = each["candidate"], each["predicted_us"]
            best = NextTrial(one.collective, one.phase, *sizes, *now, *then, low, high, worth_us)
    return best


def render_next(trials: Sequence[NextTrial], console: Console) -> None:
    """Print the next trials, or that there are none."""
    if not trials:
        console.print("Nothing would be tried: no setting that this job never ran promises enough at any key.")
        return
    line = "\n" if console.width < WIDE else " "
    runs, tried = f"runs,{line}expected us", f"would be tried,{line}expected us (90 %)"
    table = Table(f"collective,{line}phase", "bytes", runs, tried, f"worth{line}per step", box=None)
    for one in trials:
        table.add_row(
            f"{one.collective}{line}{one.phase}",
            exact_range(one.min_bytes, one.max_bytes).replace(" to ", f" to{line}"),
            f"{one.setting}{line}{one.now_us:,.1f}",
            f"{one.candidate}{line}{one.expected_us:,.1f} ({one.low_us:,.1f}..{one.high_us:,.1f})",
            f"{one.worth_us:,.1f} us",
        )  # fmt: skip
    console.print(table)
    console.print(
        "Worth is what a trial may bring: nothing is lost for good if the setting turns out slower."
        " What is tried first is what risks least; all trials together must fit the budget."
    )
