"""From communication time to step time: what a policy's gain is worth when computation hides part of it.

The step's program (tuner/offline/replay/timeline/schedule.py) is run with each policy's costs in place of the logged
durations: compute gaps and waits stay, streams queue as before. Where no program follows from a trace, the
answer is first order: the exposed share of communication is taken to stay what it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from zerotune.tuner.offline.replay.engine import PolicyTotal, ShapeVerdict
from zerotune.tuner.offline.replay.estimates import NORMAL_95
from zerotune.tuner.offline.replay.table import CollectiveTable, Shape
from zerotune.tuner.offline.replay.timeline.program import Program, Slowdown, StepTime, steady_step
from zerotune.tuner.offline.replay.timeline.schedule import StepModel, infer

MAX_MODEL_ERROR_PERCENT: Final = 5.0
"""A program that misses the logged steps by more is not used."""
LEAST_MODEL_ERROR_PERCENT: Final = 0.2
OVERLAP_DOUBT: Final = 0.12
"""Doubt (95 %) about a step whose hidden communication changes, as a share of that change: a log does not show how much
more computation could hide. Measured by predicting programs from logs of half or twice their communication; 0 where
nothing is hidden.
"""
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
    """Change of step time against the baseline policy, not against the log, in which other settings may have run."""
    change_low_percent: float
    change_high_percent: float


class StepRefusal(msgspec.Struct, frozen=True):
    """A policy whose step is not judged, and the share of the step's communication without evidence."""

    policy: str
    refused_share_percent: float


class StepFacts(msgspec.Struct, frozen=True):
    """The logged steps (medians of those that the program was made of), and how they were understood."""

    n_steps: int
    step_us: float
    exposed_us: float
    communication_us: float
    compute_us: float
    method: str
    """`overlap`: by the step's program; `first order`: by the exposed share, for the reason in `reason`."""
    reason: str = ""
    model_error_percent: float = 0.0
    noise_percent: float = 0.0
    """Standard error of `step_us`."""
    waits: dict[str, str] = {}
    """Kind of collective -> when it is taken to be waited for."""

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a share of all communication."""
        return min(self.exposed_us / self.communication_us, 1.0) if self.communication_us > 0 else 0.0


def step_facts(table: CollectiveTable, slowdown: Slowdown | None = None) -> tuple[StepFacts | None, StepModel | None]:
    """The trace's steps and their program; (None, None) when it lacks steps, exposure or durations."""
    model = infer(table, slowdown)
    reason = model if isinstance(model, str) else ""
    if isinstance(model, StepModel) and model.error_percent > MAX_MODEL_ERROR_PERCENT:
        reason = f"no rule of waiting reproduces the logged steps to better than {model.error_percent:.0f} %"
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
            noise_percent=model.noise_percent,
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
    default_channels: Mapping[Shape, int],
    total_logged_us: float,
    logged: StepFacts | None = None,
) -> tuple[list[StepEstimate], list[StepRefusal]]:
    """Step time under each policy that could be judged.

    Args:
        facts: the logged steps, or those of a changed job.
        model: the step's program; None: only the exposed share is known.
        totals: of the policies.
        verdicts: by policy and shape.
        default_channels: channels of NCCL's own choice, by shape.
        total_logged_us: communication of the whole trace.
        logged: the logged steps, where `facts` are those of a changed job.

    Returns:
        Estimates, and the policies without one.
    """
    if model is None:
        return _first_order(facts, totals, total_logged_us)
    estimates: list[StepEstimate] = []
    refusals: list[StepRefusal] = []
    for total in totals:
        judged = verdicts[total.policy]
        silent_us = sum(
            call.logged_us
            for call in model.program.calls
            if judged[call.shape].cost_us is None or judged[call.shape].baseline_us is None
        )
        if silent_us > 0:
            refusals.append(StepRefusal(total.policy, 100 * silent_us / model.program.communication_us))
        else:
            estimates.append(_by_program(facts, logged or facts, model.program, total, judged, default_channels))
    return estimates, refusals


def usual_durations(program: Program) -> dict[Shape, float]:
    """Mean logged duration of each shape over its places in the step (us)."""
    logged_us: dict[Shape, list[float]] = {}
    for call in program.calls:
        logged_us.setdefault(call.shape, []).append(call.logged_us)
    return {shape: sum(known) / len(known) for shape, known in logged_us.items()}


def correction(program: Program, facts: StepFacts) -> Callable[[StepTime], StepTime]:
    """Corrects step times by the factors by which the program misses the steps that it was made of.

    Step time has one factor, the computation in it another; exposed communication is the difference of the two.
    """
    own = steady_step(program)
    factor = facts.step_us / own.step_us
    own_compute_us = own.step_us - own.exposed_us
    compute_factor = (facts.step_us - facts.exposed_us) / own_compute_us if own_compute_us > 0 else factor

    def corrected(step: StepTime) -> StepTime:
        step_us = step.step_us * factor
        compute_us = (step.step_us - step.exposed_us) * compute_factor
        return StepTime(step_us, min(max(step_us - compute_us, 0.0), step_us))

    return corrected


def _overlap_doubt_us(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Between two steps of (communication, exposed)."""
    hidden_us = max(communication_us - exposed_us for communication_us, exposed_us in (one, other))
    return OVERLAP_DOUBT * max(min(abs(one[0] - other[0]), hidden_us), 0.0)


def _by_program(
    facts: StepFacts,
    seen: StepFacts,
    program: Program,
    total: PolicyTotal,
    judged: Mapping[Shape, ShapeVerdict],
    default_channels_of: Mapping[Shape, int],
) -> StepEstimate:
    calls = program.calls
    usual_us = usual_durations(program)
    differs = [judged[call.shape].setting != "baseline" for call in calls]
    default_channels = [default_channels_of[call.shape] for call in calls]
    channels = [judged[call.shape].n_channels or default for call, default in zip(calls, default_channels, strict=True)]

    def durations(of_baseline: bool = False, all_by: float = 1.0, changed_by: float = 1.0) -> list[float]:
        """Each collective's cost; where in the step it takes longer than others of its shape, it still does."""
        found = []
        for call, is_changed in zip(calls, differs, strict=True):
            one = judged[call.shape]
            cost_us = (one.baseline_us if of_baseline else one.cost_us) or 0.0
            factor = all_by * (changed_by if is_changed else 1.0)
            found.append(cost_us * call.logged_us / usual_us[call.shape] * factor)
        return found

    corrected = correction(program, facts)

    def step(all_by: float = 1.0, changed_by: float = 1.0) -> StepTime:
        return corrected(steady_step(program, durations(all_by=all_by, changed_by=changed_by), channels))

    baseline = corrected(steady_step(program, durations(of_baseline=True), default_channels))
    found, communication_us = step(), sum(durations())
    low_by, high_by = (end_us / total.cost_us if total.cost_us > 0 else 1.0 for end_us in (total.low_us, total.high_us))
    # The change's interval moves those collectives alone whose setting is not the baseline's.
    changed_us = sum((one.cost_us or 0.0) * one.n_collectives for one in judged.values() if one.setting != "baseline")
    ends_percent = total.gain_high_percent, total.gain_low_percent
    doubts_us = [total.baseline_us * (total.gain_percent - end_percent) / 100 for end_percent in ends_percent]
    best_by, worst_by = (max(1 + one / changed_us, 0.0) if changed_us > 0 else 1.0 for one in doubts_us)
    program_error = max(facts.model_error_percent, LEAST_MODEL_ERROR_PERCENT) / 100
    error_us = math.hypot(
        found.step_us * program_error,
        found.step_us * NORMAL_95 * facts.noise_percent / 100,
        _overlap_doubt_us((communication_us, found.exposed_us), (seen.communication_us, seen.exposed_us)),
    )
    of_baseline = sum(durations(of_baseline=True)), baseline.exposed_us
    change_doubt_us = _overlap_doubt_us((communication_us, found.exposed_us), of_baseline)
    change_error_us = math.hypot(baseline.step_us * program_error, change_doubt_us) if any(differs) else 0.0

    def change_percent(step_us: float) -> float:
        return 100 * (step_us / baseline.step_us - 1)

    return StepEstimate(
        policy=total.policy,
        step_us=found.step_us,
        low_us=step(all_by=low_by).step_us - error_us,
        high_us=step(all_by=high_by).step_us + error_us,
        exposed_us=found.exposed_us,
        communication_us=communication_us,
        change_percent=change_percent(found.step_us),
        change_low_percent=change_percent(step(changed_by=best_by).step_us - change_error_us),
        change_high_percent=change_percent(step(changed_by=worst_by).step_us + change_error_us),
    )


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
