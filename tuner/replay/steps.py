"""From communication time to step time: what a policy's gain is worth when computation hides part of it.

The step's program (tuner/replay/schedule.py) is run with each policy's costs in place of the logged
durations: compute gaps and waits stay, streams queue as before. Where a trace does not tell a program, the
answer is first order: the exposed share of communication is taken to stay what it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from tuner.replay.engine import PolicyTotal, ShapeVerdict
from tuner.replay.program import StepTime, steady_step
from tuner.replay.schedule import StepModel, infer
from tuner.replay.table import CollectiveTable, Shape

MAX_MODEL_ERROR_PERCENT: Final = 5.0
"""A program that misses the logged steps by more is not used."""
LEAST_MODEL_ERROR_PERCENT: Final = 0.2
OVERLAP: Final = "overlap"
FIRST_ORDER: Final = "first order"


class StepEstimate(msgspec.Struct, frozen=True):
    """A policy's step; `low_us` and `high_us` bound its step time (95 %)."""

    policy: str
    step_us: float
    low_us: float
    high_us: float
    exposed_us: float
    communication_us: float
    change_percent: float
    """Step time against the baseline policy's, not against the log: the log may have tried other settings."""
    change_low_percent: float
    change_high_percent: float


class StepRefusal(msgspec.Struct, frozen=True):
    """A policy whose step is not judged, and the share of the step's communication without evidence."""

    policy: str
    refused_share_percent: float


class StepFacts(msgspec.Struct, frozen=True):
    """The logged steps (medians), and how they were understood."""

    n_steps: int
    step_us: float
    exposed_us: float
    communication_us: float
    compute_us: float
    method: str
    """`overlap`: by the step's program; `first order`: by the exposed share, for the reason in `reason`."""
    reason: str = ""
    model_error_percent: float = 0.0
    waits: dict[str, str] = {}
    """Kind of collective -> when it is taken to be waited for."""

    @property
    def exposed_share(self) -> float:
        """Of the communication."""
        return min(self.exposed_us / self.communication_us, 1.0) if self.communication_us > 0 else 0.0


def step_facts(table: CollectiveTable) -> tuple[StepFacts | None, StepModel | None]:
    """What the trace tells of its steps; (None, None) when it lacks steps, exposure or durations."""
    model = infer(table)
    reason = model if isinstance(model, str) else ""
    if isinstance(model, StepModel) and model.error_percent > MAX_MODEL_ERROR_PERCENT:
        reason = f"no rule of waiting gives the logged steps better than to {model.error_percent:.0f} %"
    if isinstance(model, StepModel) and not reason:
        program = model.program
        waits = {f"{kind[0].name} {kind[1].name}": rule.value for kind, rule in model.rules.items()}
        facts = StepFacts(
            n_steps=model.n_steps,
            step_us=model.logged_step_us,
            exposed_us=model.logged_exposed_us,
            communication_us=program.communication_us,
            compute_us=program.compute_us,
            method=OVERLAP,
            model_error_percent=model.error_percent,
            waits=waits,
        )
        return facts, model
    return _first_order_facts(table, reason), None


def _first_order_facts(table: CollectiveTable, reason: str) -> StepFacts | None:
    steps = table.steps
    if "exposed_us" not in (steps.dtype.names or ()) or not len(table.rows):
        return None
    known = steps[np.isfinite(steps["exposed_us"]) & (steps["duration_us"] > 0)]
    duration_us = np.nan_to_num(table.duration_us.astype(np.float64))
    numbers, index = np.unique(table.rows["step"], return_inverse=True)
    by_step_us = dict(zip(numbers.tolist(), np.bincount(index, weights=duration_us).tolist(), strict=True))
    sums_us = np.array([by_step_us.get(step, 0.0) for step in known["step"].tolist()])
    if np.count_nonzero(sums_us > 0) < 1:
        return None
    known, sums_us = known[sums_us > 0], sums_us[sums_us > 0]
    return StepFacts(
        n_steps=len(known),
        step_us=float(np.median(known["duration_us"])),
        exposed_us=float(np.median(known["exposed_us"])),
        communication_us=float(np.median(sums_us)),
        compute_us=float(np.median(known["duration_us"] - known["exposed_us"])),
        method=FIRST_ORDER,
        reason=reason,
    )


def step_estimates(
    facts: StepFacts,
    model: StepModel | None,
    totals: Sequence[PolicyTotal],
    verdicts: Mapping[str, Mapping[Shape, ShapeVerdict]],
    logged_us: Mapping[Shape, float],
    total_logged_us: float,
) -> tuple[list[StepEstimate], list[StepRefusal]]:
    """Step time under each policy that could be judged; `logged_us` is the median duration by shape."""
    if model is not None:
        return _by_program(facts, model, totals, verdicts, logged_us)
    return _first_order(facts, totals, total_logged_us)


def _by_program(
    facts: StepFacts,
    model: StepModel,
    totals: Sequence[PolicyTotal],
    verdicts: Mapping[str, Mapping[Shape, ShapeVerdict]],
    logged_us: Mapping[Shape, float],
) -> tuple[list[StepEstimate], list[StepRefusal]]:
    calls = model.program.calls
    # The program's own small error cancels: it is asked for changes only.
    logged = steady_step(model.program)
    offset_us, offset_exposed_us = facts.step_us - logged.step_us, facts.exposed_us - logged.exposed_us
    base_us = [
        call.logged_us * (one.baseline_us / logged_us[call.shape]) if one.baseline_us is not None else None
        for call in calls
        for one in [next(iter(verdicts.values()))[call.shape]]
    ]
    estimates, refusals = [], []
    for total in totals:
        judged = verdicts[total.policy]
        durations: list[float] = []
        silent_us = 0.0
        for call in calls:
            one = judged[call.shape]
            if one.cost_us is None or one.baseline_us is None:
                silent_us += call.logged_us
                continue
            durations.append(call.logged_us * one.cost_us / logged_us[call.shape])
        if silent_us > 0:
            refusals.append(StepRefusal(total.policy, 100 * silent_us / model.program.communication_us))
            continue
        base = [us for us in base_us if us is not None]
        relative = (total.high_us - total.low_us) / 2 / total.cost_us if total.cost_us > 0 else 0.0
        step, low, high = (_steady(model, durations, 1 + sign * relative) for sign in (0, -1, 1))
        baseline_us = _steady(model, base, 1.0).step_us + offset_us
        # The change's interval moves those collectives alone whose setting differs from the baseline.
        differs = [judged[call.shape].setting != "baseline" for call in calls]
        doubt_us = total.baseline_us * (total.gain_high_percent - total.gain_low_percent) / 200
        changed_us = sum(
            (one.cost_us or 0.0) * one.n_collectives for one in judged.values() if one.setting != "baseline"
        )
        doubt = doubt_us / changed_us if changed_us > 0 else 0.0
        ends_us = [
            steady_step(
                model.program,
                [us * (1 + sign * doubt) if is_other else us for us, is_other in zip(durations, differs, strict=True)],
            ).step_us
            for sign in (-1, 1)
        ]
        model_error_us = facts.step_us * max(facts.model_error_percent, LEAST_MODEL_ERROR_PERCENT) / 100
        change_error_us = model_error_us if any(differs) else 0.0
        step_us = step.step_us + offset_us
        estimates.append(
            StepEstimate(
                policy=total.policy,
                step_us=step_us,
                low_us=low.step_us + offset_us - model_error_us,
                high_us=high.step_us + offset_us + model_error_us,
                exposed_us=max(step.exposed_us + offset_exposed_us, 0.0),
                communication_us=sum(durations),
                change_percent=100 * (step_us / baseline_us - 1),
                change_low_percent=100 * ((ends_us[0] + offset_us - change_error_us) / baseline_us - 1),
                change_high_percent=100 * ((ends_us[1] + offset_us + change_error_us) / baseline_us - 1),
            )
        )
    return estimates, refusals


def _steady(model: StepModel, durations_us: Sequence[float], factor: float) -> StepTime:
    return steady_step(model.program, [us * factor for us in durations_us])


def _first_order(
    facts: StepFacts, totals: Sequence[PolicyTotal], logged_us: float
) -> tuple[list[StepEstimate], list[StepRefusal]]:
    """The bounds need no assumption: all of the change hidden behind computation, or all of it exposed."""
    estimates, refusals = [], []
    least_us = facts.step_us - facts.exposed_us
    for total in totals:
        if total.n_refused or total.n_judged == 0 or logged_us <= 0:
            refusals.append(StepRefusal(total.policy, total.refused_share_percent))
            continue

        def step_us(cost_us: float, share: float) -> float:
            change_us = (cost_us / logged_us - 1) * facts.communication_us
            return max(facts.step_us + share * change_us, least_us)

        share = facts.exposed_share
        baseline_us, policy_us = step_us(total.baseline_us, share), step_us(total.cost_us, share)
        ends = sorted(step_us(total.cost_us, one) for one in (0.0, 1.0))
        changes = sorted(
            100 * (step_us(total.cost_us, one) / step_us(total.baseline_us, one) - 1) for one in (0.0, 1.0)
        )
        estimates.append(
            StepEstimate(
                policy=total.policy,
                step_us=policy_us,
                low_us=ends[0],
                high_us=ends[1],
                exposed_us=max(facts.exposed_us + policy_us - facts.step_us, 0.0),
                communication_us=facts.communication_us * total.cost_us / logged_us,
                change_percent=100 * (policy_us / baseline_us - 1),
                change_low_percent=changes[0],
                change_high_percent=changes[1],
            )
        )
    return estimates, refusals
