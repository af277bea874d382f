"""Infers the step's program from a trace: computation between the collectives, and waits for them.

A trace has each collective's start and duration, and each step's length and exposed communication. It does
not say where a rank waited. For each kind of collective, a few *rules* of waiting that frameworks use are tried. The
chosen rule is that whose program, run with the logged durations, best reproduces the logged starts and step times.
Computation comes from gaps: if a stream was idle, the collective started when computation reached its issue. Of
computation hidden behind communication, only the sum is known (step time less exposed communication less idle gaps);
it is divided by the bytes of the collectives concerned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import numpy as np

from ....store.records import Collective, Phase
from ...advice.prediction.timeline import Op, OpKind, Program, Slowdown, run, undisturbed
from .table import CollectiveTable
from .usual_steps import Gaps, Kind, Time, TimelineCall, UsualSteps, usual_steps

QUEUED_US: Final = 2.0
"""A call that starts this soon after its predecessor's end was queued: no computation lies between."""
MAX_CLOCK_ERROR: Final = 0.1
MIN_BETTER: Final = 0.1
MIN_BETTER_SHARE: Final = 0.002
"""An unusual rule must fit better by this share of the misfit and of the step; less is noise."""
LIKE_SPREAD: Final = 2.0
"""Spreads over a few steps count as equal if their ratio is below this."""


class Rule(Enum):
    """When the rank waits for a collective."""

    at_once = "as soon as it is issued"
    next_of_kind = "before the next of its kind is issued"
    second_of_kind = "before the next but one of its kind is issued"
    end_of_row = "when all of its kind in a row are issued"


@dataclass(frozen=True)
class StepModel:
    """The program of the trace's usual step, and how well it reproduces the logged steps."""

    program: Program[TimelineCall]
    rules: Mapping[Kind, Rule]
    n_steps: int
    """Number of logged steps like the program."""
    logged_step_us: float
    """Median of the steps behind the program; earlier steps may have run under other settings."""
    logged_exposed_us: float
    error_percent: float
    """Median distance of the program's step time from the logged ones, in percent, with the logged durations."""
    noise_percent: float = 0.0
    """Standard error of `logged_step_us`."""


def infer(table: CollectiveTable, slowdown: Slowdown | None = None) -> StepModel | str:
    """The step's program, or the reason why none follows from the trace.

    `slowdown` is the effect of collectives' channels on concurrent computation, if that is known.
    """
    steps = usual_steps(table)
    if isinstance(steps, str):
        return steps
    period_us = steps.gaps.median_us(("start", 0), ("start", len(steps.calls)))
    if abs(period_us / steps.step_us - 1) > MAX_CLOCK_ERROR:
        return f"by the collectives' starts a step takes {period_us:,.0f} us, by the step records {steps.step_us:,.0f}"
    rules = {kind: _usual_rule(kind) for kind in dict.fromkeys(steps.kinds)}
    program = _fitted(steps, rules)
    best = _misfit(steps, program)
    for _ in range(2):
        changed = False
        for kind in rules:
            for rule in Rule:
                tried = {**rules, kind: rule}
                if rule is rules[kind]:
                    continue
                candidate = _fitted(steps, tried)
                misfit = _misfit(steps, candidate)
                if misfit < best * (1 - MIN_BETTER) - MIN_BETTER_SHARE:
                    rules, program, best, changed = tried, candidate, misfit, True
        if not changed:
            break
    if slowdown is not None:
        program = undisturbed(program, slowdown)
    return StepModel(
        program=program,
        rules=rules,
        n_steps=steps.n_like,
        logged_step_us=steps.step_us,
        logged_exposed_us=steps.exposed_us,
        error_percent=100 * _period_error(steps, program),
        noise_percent=steps.noise_percent,
    )


def _usual_rule(kind: Kind) -> Rule:
    collective, phase = kind
    if phase in (Phase.forward_gather, Phase.backward_gather):
        return Rule.next_of_kind
    if phase is Phase.other and collective is not Collective.all_reduce:
        return Rule.at_once
    return Rule.end_of_row


# ---- rules and computation -----------------------------------------------------------------------


_BACKWARD: Final = frozenset({
    (Collective.all_gather, Phase.backward_gather),
    (Collective.reduce_scatter, Phase.gradient_scatter),
    (Collective.all_reduce, Phase.gradient_scatter),
})  # fmt: skip
"""Kinds that alternate in the backward pass: a sequence of one continues among the others."""


def _waited_before(kinds: Sequence[Kind], rules: Mapping[Kind, Rule]) -> dict[int, list[int]]:
    """Segment -> collectives waited for in it; segment i lies between the issues of i and i + 1."""
    waits: dict[int, list[int]] = defaultdict(list)
    n_later_of = {Rule.at_once: 0, Rule.next_of_kind: 1, Rule.second_of_kind: 2}
    for kind, rule in rules.items():
        n_later = n_later_of.get(rule)
        of_row = _BACKWARD if kind in _BACKWARD else {kind}
        later: list[int] = []  # calls of its kind; the next one is last
        row_ends = len(kinds)
        for at in range(len(kinds) - 1, -1, -1):
            if kinds[at] not in of_row:
                row_ends = at
            if kinds[at] != kind:
                continue
            if n_later is None or (n_later == 2 and len(later) < 2):
                place = row_ends - 1
            else:
                place = later[-n_later] - 1 if 0 < n_later <= len(later) else at
            waits[place].append(at)
            later.append(at)
    return {place: sorted(waited) for place, waited in waits.items()}


@dataclass
class _Segment:
    """Computation between two issues: `before_us` before the waits, `after_us` after them."""

    waits: list[int]
    weight: float
    before_us: float = 0.0
    after_us: float = 0.0
    most_hidden_us: float = 0.0
    """Most computation that communication may have hidden."""
    stalled_us: float = 0.0
    """Reduction of computation if the gap is a stall, if that is equally likely; 0: it is not."""
    stall_doubt: float = 0.0
    """By how much a stall fits worse than computation."""


def _fitted(steps: UsualSteps, rules: Mapping[Kind, Rule]) -> Program[TimelineCall]:
    """The program under `rules`, with the trace's computation."""
    waits = _waited_before(steps.kinds, rules)
    idle_us, launch_us = steps.idle_and_launch_us
    is_idle = (idle_us > QUEUED_US).tolist()
    stalled: set[int] = set()
    while True:
        segments = [_Segment(waits.get(at, []), float(call.shape.message_bytes)) for at, call in enumerate(steps.calls)]
        _measure(steps.gaps, segments, is_idle, stalled)
        # Computation exceeds the step records, so a gap that may be a stall was one.
        surplus_us = sum(segment.before_us + segment.after_us for segment in segments) - steps.compute_us
        doubtful = {
            at: segment.stall_doubt for at, segment in enumerate(segments) if 0 < segment.stalled_us <= surplus_us
        }
        if not doubtful:
            break
        stalled.add(min(doubtful, key=lambda at: doubtful[at]))
    _share_out(segments, steps.compute_us)
    ops: list[Op] = []
    for at, segment in enumerate(segments):
        ops.append(Op(OpKind.issue, at))
        if segment.before_us:
            ops.append(Op(OpKind.compute, us=segment.before_us))
        ops.extend(Op(OpKind.wait, waited) for waited in segment.waits)
        if segment.after_us:
            ops.append(Op(OpKind.compute, us=segment.after_us))
    calls = tuple(
        replace(call, launch_us=0.0 if idle > QUEUED_US else launch)
        for call, idle, launch in zip(steps.calls, idle_us.tolist(), launch_us.tolist(), strict=True)
    )
    return Program(calls, tuple(ops))


def _measure(
    gaps: Gaps, segments: Sequence[_Segment], is_idle: Sequence[bool], known_stalled: Collection[int] = ()
) -> None:
    """Fill in the computation from gaps, and bounds of hidden computation.

    A gap after a wait is the computation after a stall, or all computation since the last known time. The one that
    varies less from step to step is chosen. If they hardly differ, the segment says so, and `known_stalled` decides.
    If a collective's stream was idle, its start is the time of its issue. Queued collectives were issued at some
    earlier time: segments between two known times share the computation between them.
    """
    known: Time = ("start", 0)
    unknown: list[int] = []
    for at, segment in enumerate(segments):
        start, following = ("start", at), ("start", at + 1)
        next_is_idle = is_idle[(at + 1) % len(segments)]
        if is_idle[at]:
            known, unknown = start, []
        unknown.append(at)
        if not segment.waits:
            if next_is_idle:
                _spread_over(gaps, segments, unknown, known, following)
            else:
                segment.most_hidden_us = max(gaps.median_us(start, following), 0.0)
            continue
        waited = ("waited", *segment.waits)
        by_stall_us, by_work_us = gaps.spread_us(waited, following), gaps.spread_us(known, following)
        if next_is_idle and not by_stall_us <= by_work_us and at not in known_stalled:
            if by_stall_us <= LIKE_SPREAD * by_work_us:
                segment.stalled_us = max(gaps.median_us(known, waited), 0.0)
                segment.stall_doubt = by_stall_us / by_work_us
            if segment.waits != [at]:
                _spread_over(gaps, segments, unknown, known, following)
            else:
                segment.before_us = max(gaps.median_us(start, following), 0.0)
            continue
        segment.after_us = max(gaps.median_us(waited, following), 0.0) if next_is_idle else 0.0
        segment.most_hidden_us = max(gaps.median_us(start, ("sooner", waited, following)), 0.0)
        known, unknown = ("computed", segment.after_us, *segment.waits), []


def _spread_over(
    gaps: Gaps, segments: Sequence[_Segment], unknown: Sequence[int], known: Time, following: Time
) -> None:
    """Share the computation between two times among the `unknown` segments by weight.

    No call may start before its issue.
    """
    total_us = gaps.median_us(known, following)
    weights = sum(segments[at].weight for at in unknown)
    done_us = 0.0
    for at in unknown[:-1]:
        latest_us = min(gaps.median_us(known, ("start", at + 1)), total_us)
        _hold(segments[at], min(total_us * segments[at].weight / weights, latest_us - done_us))
        done_us += segments[at].before_us
    _hold(segments[unknown[-1]], total_us - done_us)


def _hold(segment: _Segment, compute_us: float) -> None:
    segment.before_us, segment.most_hidden_us = max(compute_us, 0.0), 0.0


def _share_out(segments: Sequence[_Segment], compute_us: float) -> None:
    """Distribute the computation that no gap shows to segments that have room for it, by weight."""
    hidden_us = compute_us - sum(segment.before_us + segment.after_us for segment in segments)
    open_ones = [segment for segment in segments if segment.most_hidden_us > 0]
    while hidden_us > 1e-6 and open_ones:
        weights = sum(segment.weight for segment in open_ones)
        full = [one for one in open_ones if hidden_us * one.weight / weights >= one.most_hidden_us - one.before_us]
        if not full:
            for one in open_ones:
                one.before_us += hidden_us * one.weight / weights
            return
        for one in full:
            hidden_us -= one.most_hidden_us - one.before_us
            one.before_us = one.most_hidden_us
        open_ones = [one for one in open_ones if one not in full]


# ---- how good ------------------------------------------------------------------------------------


def _misfit(steps: UsualSteps, program: Program[TimelineCall]) -> float:
    """Distance of the program's starts and step times from the logged ones, as shares of the step."""
    simulated = np.array([one.starts_us for one in run(program, steps.durations_us.tolist())])
    inside = (simulated - simulated[:, :1]) - (steps.starts_us - steps.starts_us[:, :1])
    compute_error = abs(program.compute_us - steps.compute_us)
    return float(np.mean(np.abs(inside[1:])) + compute_error) / steps.step_us + _period_error(steps, program)


def _period_error(steps: UsualSteps, program: Program[TimelineCall]) -> float:
    """Median relative distance of the step time."""
    simulated = np.array([one.starts_us[0] for one in run(program, steps.durations_us.tolist())])
    logged = np.diff(steps.starts_us[:, 0])
    return float(np.median(np.abs(np.diff(simulated)[1:] - logged[1:]) / logged[1:]))
