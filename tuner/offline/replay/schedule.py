"""From a trace to the step's program: what computes between the collectives, and what waits for what.

A trace has each collective's start and duration, and each step's length and exposed communication. It does
not say where a rank waited. For each kind of collective a few *rules* of waiting are tried, those by which
frameworks work; the rule is kept under which the program, run with the durations of the logged steps, best
gives the logged starts and step times. Computation comes from the gaps: where a stream was idle, the collective
started when computation had reached its issue. Of computation hidden behind communication only the sum is
known (step time less exposed less idle gaps); it is divided by the bytes of the collectives concerned.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.lib.recfunctions import repack_fields
from numpy.typing import NDArray

from zerotune.store.records import Collective, Phase
from zerotune.tuner.advice.prediction.timeline import Op, OpKind, Program, Slowdown, StreamCall, run, undisturbed
from zerotune.tuner.offline.replay.estimates import error_of_median
from zerotune.tuner.offline.replay.table import CollectiveTable, Shape

Floats = NDArray[np.float64]
Kind = tuple[Collective, Phase]

MIN_STEPS: Final = 5
MAX_STEP_CALLS: Final = 3000
"""Longer steps are not modelled: no framework issues that many collectives in one."""
MAX_SIMULATED_CALLS: Final = 1500
"""Logged steps used for choosing rules, times the collectives of one."""
QUEUED_US: Final = 2.0
"""Between a predecessor's end and a start this soon after it lies no computation: the call was queued."""
MAX_CLOCK_ERROR: Final = 0.1
MIN_BETTER: Final = 0.1
MIN_BETTER_SHARE: Final = 0.002
"""By how much an unusual rule must fit better, as a share of the misfit and of the step: less is noise."""
LIKE_SPREAD: Final = 2.0
"""Spreads over a few steps whose ratio is below this are taken as equal."""
_WINDOW_STEPS: Final = 32


class Rule(Enum):
    """When the rank waits for a collective."""

    at_once = "as soon as it is issued"
    next_of_kind = "before the next of its kind is issued"
    second_of_kind = "before the next but one of its kind is issued"
    end_of_row = "when all of its kind in a row are issued"


@dataclass(frozen=True, kw_only=True)
class TimelineCall(StreamCall):
    """One collective of the step; what it takes is the median of what the trace shows at this place of the step."""

    shape: Shape


@dataclass(frozen=True)
class StepModel:
    """The program of the trace's usual step, and how well it gives the logged steps."""

    program: Program[TimelineCall]
    rules: Mapping[Kind, Rule]
    n_steps: int
    """Logged steps that are like it."""
    n_other_steps: int
    logged_step_us: float
    """Median of the steps that the program was made of: earlier ones may have run under other settings."""
    logged_exposed_us: float
    error_percent: float
    """Median distance of the program's step time from the logged ones, in percent, with the logged durations."""
    noise_percent: float = 0.0
    """Standard error of `logged_step_us`."""


@dataclass(frozen=True)
class _Steps:
    """Consecutive like steps: starts and durations [n_steps, n_calls], and per step its length and exposure."""

    calls: tuple[TimelineCall, ...]
    kinds: tuple[Kind, ...]
    starts_us: Floats
    durations_us: Floats
    compute_us: float
    step_us: float
    exposed_us: float
    noise_percent: float
    n_like: int
    n_other: int

    @cached_property
    def ends_us(self) -> Floats:
        return self.starts_us + self.durations_us

    @cached_property
    def idle_and_launch_us(self) -> tuple[Floats, Floats]:
        """Median gap between each collective and its predecessor on the stream, and the same but at least 0."""
        streams = np.array([call.stream for call in self.calls])
        gaps_us = np.full(self.starts_us.shape, np.inf)
        for stream in np.unique(streams).tolist():
            members = np.flatnonzero(streams == stream)
            starts, ends = self.starts_us[:, members].ravel(), self.ends_us[:, members].ravel()
            gaps = np.full(len(starts), np.nan)
            gaps[1:] = starts[1:] - ends[:-1]
            gaps_us[:, members] = gaps.reshape(-1, len(members))
        median_us = np.nan_to_num(np.nanmedian(gaps_us[1:], axis=0), posinf=0.0)
        return median_us, np.maximum(median_us, 0.0)

    @cached_property
    def gaps(self) -> _Gaps:
        return _Gaps(self)


_Time = tuple[object, ...]
"""A time of each step: ("start", at), of a collective (n_calls: of the next step's first); ("waited", *waits), when all
of these have ended; ("computed", us, *waits), so long after that; ("sooner", time, other), the first of two times."""


class _Gaps:
    """Medians and spreads of what lies between two times, over the steps; what many rules ask for is computed once."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps
        self._at: dict[_Time, Floats] = {}
        self._medians_us: dict[tuple[_Time, _Time], float] = {}
        self._spreads_us: dict[tuple[_Time, _Time], float] = {}

    def median_us(self, early: _Time, late: _Time) -> float:
        known = self._medians_us.get((early, late))
        if known is None:
            known = self._medians_us[early, late] = _median(self._times(late) - self._times(early))
        return known

    def spread_us(self, early: _Time, late: _Time) -> float:
        """Median absolute deviation."""
        known = self._spreads_us.get((early, late))
        if known is None:
            apart_us = self._times(late) - self._times(early)
            known = self._spreads_us[early, late] = _median(np.abs(apart_us - self.median_us(early, late)))
        return known

    def _times(self, time: _Time) -> Floats:
        known = self._at.get(time)
        if known is None:
            known = self._at[time] = self._computed(*time)
        return known

    def _computed(self, kind: object, *of: Any) -> Floats:
        starts_us = self._steps.starts_us
        if kind == "start":
            at = int(of[0])
            return starts_us[:, at] if at < len(self._steps.calls) else np.append(starts_us[1:, 0], np.nan)
        if kind == "waited":
            return np.asarray(np.max(self._steps.ends_us[:, of], axis=1))
        if kind == "computed":
            return self._times(("waited", *of[1:])) + float(of[0])
        return np.asarray(np.fmin(self._times(of[0]), self._times(of[1])))


def infer(table: CollectiveTable, slowdown: Slowdown | None = None) -> StepModel | str:
    """The step's program, or the reason why none follows from the trace.

    `slowdown` says what collectives' channels cost the computation beside them, where that is known.
    """
    steps = _usual_steps(table)
    if isinstance(steps, str):
        return steps
    period_us = _median(np.diff(steps.starts_us[:, 0]))
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
        n_other_steps=steps.n_other,
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


# ---- the usual step ------------------------------------------------------------------------------


def _usual_steps(table: CollectiveTable) -> _Steps | str:
    """The latest run of consecutive steps that issue the collectives of the most frequent kind of step."""
    steps = table.steps
    known = steps[np.isfinite(steps["exposed_us"]) & (steps["duration_us"] > 0)] if len(steps) else steps
    if not len(known):
        return "the trace does not tell how much communication of its steps was exposed"
    if len(known) < MIN_STEPS:
        return f"only {len(known)} of its steps tell how much communication was exposed, {MIN_STEPS} are needed"
    if np.count_nonzero(np.isfinite(table.duration_us)) < 0.5 * len(table.duration_us):
        return "too few of its collectives are timed"
    rows, duration_us = _of_own_rank(table)
    if not len(rows):
        return "it has no collectives"
    if not bool(np.all(np.diff(rows["step"].astype(np.int64)) >= 0)):
        order = np.lexsort((rows["start_ns"], rows["step"]))
        rows, duration_us = rows[order], duration_us[order]
    first = np.flatnonzero(np.diff(rows["step"], prepend=rows["step"][:1] + 1))
    numbers, count = rows["step"][first], np.diff(first, append=len(rows))
    if int(count.max(initial=0)) > MAX_STEP_CALLS:
        return f"a step has more than {MAX_STEP_CALLS} collectives"
    signatures: dict[int, bytes] = {}
    shapes = repack_fields(rows[["comm_id", "message_bytes", "n_ranks", "n_nodes", "collective", "phase"]])
    is_whole = np.logical_and.reduceat(np.isfinite(duration_us), first) & np.isin(numbers, known["step"])
    for number, start, length in zip(
        numbers[is_whole].tolist(), first[is_whole].tolist(), count[is_whole].tolist(), strict=True
    ):
        signatures[number] = shapes[start : start + length].tobytes()
    if not signatures:
        return "no step has all of its collectives timed"
    usual, n_like = Counter(signatures.values()).most_common(1)[0]
    if n_like < MIN_STEPS:
        return f"no {MIN_STEPS} of its steps issue the same collectives"
    n_calls = len(usual) // shapes.itemsize
    n_steps = max(MIN_STEPS, min(_WINDOW_STEPS, MAX_SIMULATED_CALLS // n_calls))
    chain = latest_in_a_row([number for number, signature in signatures.items() if signature == usual], n_steps)
    if len(chain) < MIN_STEPS:
        return f"no {MIN_STEPS} like steps follow one another"
    at = dict(zip(numbers.tolist(), first.tolist(), strict=True))
    pieces = np.array([np.arange(at[number], at[number] + n_calls) for number in chain])
    durations_us = duration_us[pieces].astype(np.float64)
    told_here = known[np.isin(known["step"], chain)]
    example = rows[pieces[0]]
    streams = {comm: stream for stream, comm in enumerate(dict.fromkeys(example["comm_id"].tolist()))}
    calls = tuple(
        TimelineCall(
            shape=Shape(
                int(row["n_ranks"]),
                int(row["n_nodes"]),
                Collective(int(row["collective"])),
                Phase(int(row["phase"])),
                int(row["message_bytes"]),
            ),
            stream=streams[int(row["comm_id"])],
            logged_us=float(np.median(durations_us[:, index])),
            logged_channels=int(np.median(rows["n_channels"][pieces[:, index]])),
        )
        for index, row in enumerate(example)
    )
    return _Steps(
        calls=calls,
        kinds=tuple((call.shape.collective, call.shape.phase) for call in calls),
        starts_us=rows["start_ns"][pieces] / 1e3,
        durations_us=durations_us,
        compute_us=float(np.median(told_here["duration_us"] - told_here["exposed_us"])),
        step_us=float(np.median(told_here["duration_us"])),
        exposed_us=float(np.median(told_here["exposed_us"])),
        noise_percent=100 * error_of_median(told_here["duration_us"]),
        n_like=n_like,
        n_other=len(numbers) - n_like,
    )


def _of_own_rank(table: CollectiveTable) -> tuple[NDArray[np.void], NDArray[np.float32]]:
    """The calls, and their durations, of the rank whose steps the table has.

    Calls of communicators without that rank are left out: it does not wait for them.
    """
    if table.own_comms is None:
        return table.rows, table.duration_us
    own = np.isin(table.rows["comm_id"], table.own_comms)
    return (table.rows, table.duration_us) if bool(own.all()) else (table.rows[own], table.duration_us[own])


def latest_in_a_row(numbers: Sequence[int], n_wanted: int) -> list[int]:
    """The last `n_wanted` consecutive numbers; where no stretch is that long, the last of the longest stretches."""
    ordered = np.unique(np.asarray(numbers, np.int64))
    stretches = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    enough = min(n_wanted, max(map(len, stretches)))
    latest: list[int] = [one for one in stretches if len(one) >= enough][-1].tolist()
    return latest[-n_wanted:]


# ---- rules and computation -----------------------------------------------------------------------


_BACKWARD: Final = frozenset({
    (Collective.all_gather, Phase.backward_gather),
    (Collective.reduce_scatter, Phase.gradient_scatter),
    (Collective.all_reduce, Phase.gradient_scatter),
})  # fmt: skip
"""Kinds that alternate in the backward pass: a row of one goes on among the others."""
_LATER: Final = {Rule.at_once: 0, Rule.next_of_kind: 1, Rule.second_of_kind: 2}


def _waited_before(kinds: Sequence[Kind], rules: Mapping[Kind, Rule]) -> dict[int, list[int]]:
    """Segment -> collectives waited for in it; segment i lies between the issues of i and i + 1."""
    waits: dict[int, list[int]] = defaultdict(list)
    for kind, rule in rules.items():
        of_row = _BACKWARD if kind in _BACKWARD else {kind}
        later: list[int] = []  # of its kind, the next one last
        row_ends = len(kinds)
        for at in range(len(kinds) - 1, -1, -1):
            if kinds[at] not in of_row:
                row_ends = at
            if kinds[at] != kind:
                continue
            n_later = _LATER.get(rule)
            if n_later is None or (n_later == 2 and len(later) < 2):
                place = row_ends - 1
            else:
                place = later[-n_later] - 1 if 0 < n_later <= len(later) else at
            waits[place].append(at)
            later.append(at)
    return {place: sorted(waited) for place, waited in waits.items()}


@dataclass
class _Segment:
    """Computation between two issues: `before_us` ahead of the waits, `after_us` behind them."""

    waits: list[int]
    weight: float
    before_us: float = 0.0
    after_us: float = 0.0
    most_hidden_us: float = 0.0
    """Most computation that communication may have hidden."""
    stalled_us: float = 0.0
    """By how much less was computed if the gap is a stall, where that is equally likely; 0: it is not."""
    stall_doubt: float = 0.0
    """How much worse a stall fits than computation."""


def _fitted(steps: _Steps, rules: Mapping[Kind, Rule]) -> Program[TimelineCall]:
    """The program under `rules`, with the computation that the trace shows."""
    waits = _waited_before(steps.kinds, rules)
    idle_us, launch_us = steps.idle_and_launch_us
    is_idle = (idle_us > QUEUED_US).tolist()
    stalled: set[int] = set()
    while True:
        segments = [_Segment(waits.get(at, []), float(call.shape.message_bytes)) for at, call in enumerate(steps.calls)]
        _measure(steps.gaps, segments, is_idle, stalled)
        # More computation than the step records leave room for: a gap that may be read as a stall was one.
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
    gaps: _Gaps, segments: Sequence[_Segment], is_idle: Sequence[bool], known_stalled: Collection[int] = ()
) -> None:
    """Fill in the computation that gaps show, and bounds of what they hide.

    A gap after a wait is what was computed after a stall, or all that was computed since the last known time: of the
    two, what varies less from step to step. Where they hardly differ, the segment says so; `known_stalled` decides.
    Where a collective found its stream idle, its start is the time of its issue. Queued ones were issued at some
    time before: what lies between two known times is shared by the segments between them.
    """
    known: _Time = ("start", 0)
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
    gaps: _Gaps, segments: Sequence[_Segment], unknown: Sequence[int], known: _Time, following: _Time
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
    """Give the computation that no gap shows to the segments that can hold it, by weight."""
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


def _misfit(steps: _Steps, program: Program[TimelineCall]) -> float:
    """Distance of the program's starts and step times from the logged ones, as shares of the step."""
    simulated = np.array([one.starts_us for one in run(program, steps.durations_us.tolist())])
    inside = (simulated - simulated[:, :1]) - (steps.starts_us - steps.starts_us[:, :1])
    compute_error = abs(program.compute_us - steps.compute_us)
    return float(np.mean(np.abs(inside[1:])) + compute_error) / steps.step_us + _period_error(steps, program)


def _period_error(steps: _Steps, program: Program[TimelineCall]) -> float:
    """Median relative distance of the step time."""
    simulated = np.array([one.starts_us[0] for one in run(program, steps.durations_us.tolist())])
    logged = np.diff(steps.starts_us[:, 0])
    return float(np.median(np.abs(np.diff(simulated)[1:] - logged[1:]) / logged[1:]))


def _median(values: Floats) -> float:
    """Median of the values that are not NaN; NaN if all are. np.nanmedian takes many times as long on few values."""
    known = np.sort(values[~np.isnan(values)], axis=None)
    middle = len(known) // 2
    return float(known[middle] + known[~middle]) / 2 if len(known) else math.nan
