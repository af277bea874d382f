"""From communication time to step time: what a policy's gain is worth when computation hides part of it.

A trace tells each step's length, its exposed communication and its collectives, but not which computation
waited for which collective. So the answer is first order: communication stays exposed in the proportion
in which it was (exposed over communication time, per step). The bounds are what needs no assumption: all
of the difference hidden behind computation, or none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from tuner.replay.engine import PolicyTotal
from tuner.replay.table import CollectiveTable

MIN_STEPS: Final = 5


class StepEstimate(msgspec.Struct, frozen=True):
    """A policy's step time; the bounds are: all of the change hidden, all of it exposed."""

    policy: str
    step_us: float
    low_us: float
    high_us: float
    change_percent: float
    """Against the steps as they were logged."""


class StepFacts(msgspec.Struct, frozen=True):
    """Medians over the logged steps."""

    n_steps: int
    step_us: float
    exposed_us: float
    communication_us: float
    exposed_share: float


def step_facts(table: CollectiveTable) -> StepFacts | None:
    """What the trace tells of its steps; None when it lacks steps, exposure or durations."""
    steps = table.steps
    if "exposed_us" not in (steps.dtype.names or ()) or not len(table.rows):
        return None
    known = steps[np.isfinite(steps["exposed_us"]) & (steps["duration_us"] > 0)]
    if len(known) < MIN_STEPS:
        return None
    duration_us = np.nan_to_num(table.duration_us.astype(np.float64))
    last = int(max(known["step"].max(), table.rows["step"].max()))
    if last > 50_000_000:
        return None
    by_step = np.bincount(table.rows["step"], weights=duration_us, minlength=last + 1)[known["step"]]
    whole = by_step > 0
    if np.count_nonzero(whole) < MIN_STEPS:
        return None
    share = np.minimum(known["exposed_us"][whole] / by_step[whole], 1.0)
    return StepFacts(
        n_steps=int(np.count_nonzero(whole)),
        step_us=float(np.median(known["duration_us"][whole])),
        exposed_us=float(np.median(known["exposed_us"][whole])),
        communication_us=float(np.median(by_step[whole])),
        exposed_share=float(np.median(share)),
    )


def step_estimates(facts: StepFacts, totals: Sequence[PolicyTotal], logged_us: float) -> list[StepEstimate]:
    """Step time under each policy that could be judged on the whole trace."""
    estimates = []
    for total in totals:
        if total.n_refused or total.n_judged == 0 or logged_us <= 0:
            continue
        change_us = (total.cost_us / logged_us - 1) * facts.communication_us
        least_us = facts.step_us - facts.exposed_us
        ends = sorted((facts.step_us, max(facts.step_us + change_us, least_us)))
        step_us = max(facts.step_us + facts.exposed_share * change_us, least_us)
        estimates.append(StepEstimate(total.policy, step_us, ends[0], ends[1], 100 * (step_us / facts.step_us - 1)))
    return estimates
