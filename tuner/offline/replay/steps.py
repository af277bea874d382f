"""Converts communication time to step time, as computation hides part of a policy's gain.

The step's program (schedule.py) is run with each policy's costs in place of the logged
durations: compute gaps and waits stay, streams queue as before. If a trace gives no program, the
answer is first order: the exposed share of communication is assumed to stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from ...advice.prediction.timeline import Program, StepTime, steady_step
from .judging import Judged
from .medians import NORMAL_95
from .result import PolicyTotal, StepEstimate, StepFacts, StepRefusal
from .schedule import StepModel, infer
from .table import CollectiveTable, Shape
from .usual_steps import TimelineCall

MAX_MODEL_ERROR_PERCENT: Final = 5.0
"""A program that misses the logged steps by more is not used."""
LEAST_MODEL_ERROR_PERCENT: Final = 0.2
OVERLAP_DOUBT: Final = 0.12
"""Doubt (95 %) about a step whose hidden communication changes, as a share of that change: a log does not show how much
more computation could hide. It was measured by predicting programs from logs with half or twice their communication.
It is 0 if nothing is hidden.
"""
OVERLAP: Final = "overlap"
FIRST_ORDER: Final = "first order"


class LoggedSteps(NamedTuple):
    """The trace's steps: facts about them, and the data behind those."""

    facts: StepFacts
    model: StepModel | None
    """The step's program; None: only the exposed share is known."""
    channels: Mapping[Shape, int]
    """Channels of NCCL's own choice, by shape of the program."""
    fabric_id: str


def logged_steps(table: CollectiveTable) -> LoggedSteps | None:
    """The trace's steps and their program; None: it lacks steps, exposure or durations."""
    model = infer(table, None if table.machine is None else table.machine.sms_slowdown)
    if isinstance(model, StepModel) and model.error_percent > MAX_MODEL_ERROR_PERCENT:
        model = f"no rule of waiting reproduces the logged steps to better than {model.error_percent:.0f} %"
    if isinstance(model, str):
        facts = _first_order_facts(table, model)
        return None if facts is None else LoggedSteps(facts, None, {}, table.fabric_id)
    facts = StepFacts(
        n_steps=model.n_steps,
        step_us=model.logged_step_us,
        exposed_us=model.logged_exposed_us,
        communication_us=model.program.communication_us,
        compute_us=model.program.compute_us,
        method=OVERLAP,
        model_error_percent=model.error_percent,
        noise_percent=model.noise_percent,
        waits={f"{kind[0].name} {kind[1].name}": rule.value for kind, rule in model.rules.items()},
    )
    return LoggedSteps(facts, model, _default_channels(model, table), table.fabric_id)


def _default_channels(model: StepModel, table: CollectiveTable) -> dict[Shape, int]:
    shapes, shape_index = table.shapes
    numbers = {shape: at for at, shape in enumerate(shapes)}
    timed = np.isfinite(table.duration_us)
    found = {}
    for shape in {call.shape for call in model.program.calls}:
        mine = timed & (shape_index == numbers[shape])
        own = mine & table.is_default
        found[shape] = int(np.median(table.rows["n_channels"][own if own.any() else mine]))
    return found


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
    steps: LoggedSteps | None, judged: Sequence[Judged], logged_us: float, seen: StepFacts | None = None
) -> tuple[list[StepEstimate], list[StepRefusal]]:
    """Step time under each policy that could be judged, and the policies without one.

    Args:
        steps: those of a changed job, or the logged ones; None: there are none.
        seen: the logged steps, if `steps` are those of a changed job.
    """
    estimates: list[StepEstimate] = []
    refusals: list[StepRefusal] = []
    if steps is None:
        return estimates, refusals
    for one in judged:
        refused_percent = _refused_percent(steps, one, logged_us)
        if refused_percent is not None:
            refusals.append(StepRefusal(one.total.policy, refused_percent))
        elif steps.model is None:
            estimates.append(_first_order(steps.facts, one.total, logged_us))
        else:
            estimates.append(_by_program(steps, steps.model.program, one, seen or steps.facts))
    return estimates, refusals


def _refused_percent(steps: LoggedSteps, judged: Judged, logged_us: float) -> float | None:
    """Share of the step's communication without evidence; None: all of it has some."""
    total = judged.total
    if steps.model is None:
        return total.refused_share_percent if total.n_refused or total.n_judged == 0 or logged_us <= 0 else None
    program = steps.model.program
    silent_us = sum(call.logged_us for call in program.calls if not judged.by_shape[call.shape].is_judged)
    return 100 * silent_us / program.communication_us if silent_us > 0 else None


def usual_durations(program: Program[TimelineCall]) -> dict[Shape, float]:
    """Mean logged duration of each shape over its places in the step (us)."""
    logged_us: dict[Shape, list[float]] = {}
    for call in program.calls:
        logged_us.setdefault(call.shape, []).append(call.logged_us)
    return {shape: sum(known) / len(known) for shape, known in logged_us.items()}


def correction(program: Program[TimelineCall], facts: StepFacts) -> Callable[[StepTime], StepTime]:
    """Corrects step times by the factors by which the program misses the steps that it was made of.

    Step time has one factor and its computation another; exposed communication is the difference of the two.
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
    """Doubt (us) about the difference between two steps of (communication, exposed)."""
    hidden_us = max(communication_us - exposed_us for communication_us, exposed_us in (one, other))
    return OVERLAP_DOUBT * max(min(abs(one[0] - other[0]), hidden_us), 0.0)


def _by_program(steps: LoggedSteps, program: Program[TimelineCall], policy: Judged, seen: StepFacts) -> StepEstimate:
    facts, total, judged, calls = steps.facts, policy.total, policy.by_shape, program.calls
    usual_us = usual_durations(program)
    differs = [judged[call.shape].setting != "baseline" for call in calls]
    default_channels = [steps.channels[call.shape] for call in calls]
    channels = [judged[call.shape].n_channels or default for call, default in zip(calls, default_channels, strict=True)]

    def durations(of_baseline: bool = False, all_by: float = 1.0, changed_by: float = 1.0) -> list[float]:
        """Each collective's cost; places of the step at which its shape takes longer keep their ratio."""
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
    # The change's interval applies only to collectives whose setting is not the baseline's.
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


def _first_order(facts: StepFacts, total: PolicyTotal, logged_us: float) -> StepEstimate:
    """A first-order estimate; its bounds are the change fully hidden, and fully exposed."""

    def step_us(cost_us: float, share: float) -> float:
        change_us = (cost_us / logged_us - 1) * facts.communication_us
        return max(facts.step_us + share * change_us, facts.step_us - facts.exposed_us)

    def change_percent(share: float) -> float:
        return 100 * (step_us(total.cost_us, share) / step_us(total.baseline_us, share) - 1)

    policy_us = step_us(total.cost_us, facts.exposed_share)
    low_us, high_us = sorted(step_us(total.cost_us, share) for share in (0.0, 1.0))
    change_low_percent, change_high_percent = sorted(change_percent(share) for share in (0.0, 1.0))
    return StepEstimate(
        policy=total.policy,
        step_us=policy_us,
        low_us=low_us,
        high_us=high_us,
        exposed_us=max(facts.exposed_us + policy_us - facts.step_us, 0.0),
        communication_us=facts.communication_us * total.cost_us / logged_us,
        change_percent=change_percent(facts.exposed_share),
        change_low_percent=change_low_percent,
        change_high_percent=change_high_percent,
    )
