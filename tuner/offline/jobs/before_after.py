"""Step times before and after: which steps are compared, what changed and how sure that is, or why none are compared.

In this order: two run summaries; a job's steps under NCCL's own choice at its start with those under a plan; where it
had too few of the former (a plan may be adopted within a few steps), also those of earlier jobs with the same
collectives and the same pace. Steps before a change of training's own pace or of the network are never compared with
steps after it: no plan caused that change.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zerotune.store.counted import counted
from zerotune.store.records import Decision, JobRecord, StepRecord
from zerotune.store.sqlite.database import Store
from zerotune.store.step_times import MedianChange, change
from zerotune.tuner.offline.jobs.summary import RunSummary, SummaryStep

Array = NDArray[Any]

SETTLED_SHARE: Final = 0.25
"""The last quarter of a run is compared: by then the tuner has decided."""
MIN_STEPS: Final = 8
"""Fewer steps than this are not compared."""
MIN_OWN_STEPS: Final = 3
"""Untuned steps that show whether another job has the same pace."""
NOTICED_WITHIN_STEPS: Final = 10
"""A change of pace is noticed at most this many steps after it."""
SAME_PACE: Final = 0.04
"""Medians (log) that differ by less than this, or by less than noise explains, are of the same pace."""
WORTH_TELLING_PERCENT: Final = 2.0
MAX_EARLIER_JOBS: Final = 20
"""At most this many earlier jobs are searched for one to compare with."""
HOW_TO_COMPARE: Final = (
    "Run the same training under `zerotune launch --no-agent --summary before.json` and under"
    " `zerotune launch --summary after.json`, then `zerotune report --summary before.json --summary after.json`"
)
TOO_FEW: Final = "too few steps"
STARTS_DIFFER: Final = f"First steps may be slow for other reasons, too. {HOW_TO_COMPARE}"


@dataclass(frozen=True)
class BeforeAfter:
    """Result of a comparison."""

    changes: Sequence[MedianChange]
    explanation: str
    """What was compared with what, or why nothing was."""
    remedy: str = ""
    """How to get a better comparison."""
    other_jobs: tuple[str, ...] = ()
    """Other jobs whose steps are among those before."""
    warnings: Sequence[str] = ()
    """A note to be read before the figures."""
    part: StepSpan | None = None
    """The part of the job that is compared, where it is not all of it."""


@dataclass(frozen=True)
class StepSpan:
    """Steps of a job between two changes of pace: from `first` on and before `end`."""

    first: int = 0
    end: int | None = None
    explanation: str = ""
    """Why other steps are left out."""

    def of(self, steps: Sequence[StepRecord]) -> list[StepRecord]:
        """Those of `steps` that belong to it."""
        kept = self.holds(np.array([step.step for step in steps], np.int64))
        return [step for step, is_kept in zip(steps, kept.tolist(), strict=True) if is_kept]

    def holds(self, numbers: Array) -> Array:
        """Whether each of these step numbers belongs to it."""
        return np.asarray((numbers >= self.first) & (numbers < (np.inf if self.end is None else self.end)))


def of_summaries(before: RunSummary, after: RunSummary, job_id: str = "") -> BeforeAfter:
    """Compare the last quarters of two runs.

    Args:
        before: the first run.
        after: the second run.
        job_id: the job that the rest of the page is about; empty: none.

    Returns:
        The comparison, or why there is none.
    """
    first, last = settled_of(before.steps), settled_of(after.steps)
    if min(len(first), len(last)) < MIN_STEPS:
        counts = f"{before.label} has {len(before.steps)} steps, {after.label} {len(after.steps)}"
        return BeforeAfter([], f"{TOO_FEW}: {counts}, and the last quarter has to be {MIN_STEPS} or more")
    found = _compared(first, last, f"the last quarter of two runs, {before.label} and {after.label}")
    return replace(found, warnings=tuple(_warnings(before, after, job_id)))


def _warnings(before: RunSummary, after: RunSummary, job_id: str) -> Iterator[str]:
    if after.job_id != job_id:
        why = (
            f"Job {after.job_id}, {after.label}, is not in the store" if after.job_id else f"{after.label} names no job"
        )
        yield f"{why}: all but step times and exposed communication is of job {job_id}."
    planned = [any(step.epoch for step in run.steps) for run in (before, after)]
    if planned == [True, False]:
        yield f"Steps of {before.label} ran under plans, steps of {after.label} did not: are the two swapped?"
    for run in (before, after):
        if run.n_disagreements:
            yield f"Ranks disagreed in {run.n_disagreements:,} calls of {run.label}: its times tell nothing."


class JobsRead:
    """Jobs of a store with their steps and shapes, each read once."""

    def __init__(self, store: Store) -> None:
        self.all = store.jobs()
        """The oldest first."""
        self.steps = functools.cache(store.steps)
        self.decisions = functools.cache(lambda job_id: store.decisions(job_id=job_id))
        self.shapes = functools.cache(store.shapes)
        """Shapes of a job. This scans all its measurements, so it is called only for jobs of one pace."""

    def untuned(self, job_id: str) -> list[StepRecord]:
        """A job's steps under NCCL's own choice at its start, those of its first pace."""
        steps = self.steps(job_id)
        return _untuned(part_around_first_plan(steps, self.decisions(job_id)).of(steps))


def of_job(jobs: JobsRead, job: JobRecord) -> BeforeAfter:
    """This job's own start, or an earlier job's, and this job's last steps under a plan."""
    steps, decisions = jobs.steps(job.job_id), jobs.decisions(job.job_id)
    if not steps:
        return BeforeAfter([], f"{TOO_FEW}: the store has no step times of this job")
    if not any(step.epoch for step in steps):
        return BeforeAfter([], f"nothing to compare: {without_plan(steps)}")
    part = part_around_first_plan(steps, decisions)
    alike = part.of(steps)
    found = _of_part(jobs, job, alike, [step for step in alike if step.epoch > 0])
    if not part.explanation:
        return found
    # A part that has ended gets no longer by training on.
    remedy = found.remedy if found.remedy and part.end is None else HOW_TO_COMPARE
    return replace(found, part=part, explanation=f"{found.explanation}. {part.explanation}", remedy=remedy)


def without_plan(steps: Sequence[StepRecord]) -> str:
    """What is known of a job none of whose steps (one at least) ran under a plan, in words."""
    heard, n_steps = {0, *(step.step for step in steps)}, 1 + max(step.step for step in steps)  # the first has no time
    known = "all" if len(heard) == n_steps else f"{len(heard):,} of them"
    return f"no plan was adopted in {counted(n_steps, 'step')}, {known} heard of by a daemon: NCCL's own choice ran"


def is_of_pace(decision: Decision) -> bool:
    """Whether it reports a change of training's pace or of the network."""
    return decision.is_of_job and decision.kind in ("pace", "regime", "keep")


def part_around_first_plan(steps: Sequence[StepRecord], decisions: Sequence[Decision]) -> StepSpan:
    """The steps around the adoption of the first plan up to the changes of pace, or of the network, next to it."""
    adopted = next((step.step for step in steps if step.epoch > 0), 0)
    part = StepSpan()
    for one in decisions:
        if not is_of_pace(one):
            continue
        noticed, when = one.step, f"at step {one.step}"
        if noticed is None:  # by an older version: sometime in the epoch before the one to come
            first = next((step.step for step in steps if step.epoch >= one.epoch - 1), steps[-1].step)
            noticed, when = first + NOTICED_WITHIN_STEPS, "later on"
        if noticed <= adopted:
            part = StepSpan(noticed, None, f"Steps before step {noticed} are left out: {one.reason}")
        else:
            end = max(noticed - NOTICED_WITHIN_STEPS, adopted)
            left_out = f"Steps from step {end} on are left out: {when} it was noticed that {one.reason}"
            return replace(part, end=end, explanation=". ".join(filter(None, (part.explanation, left_out))))
    return part


def _of_part(jobs: JobsRead, job: JobRecord, steps: Sequence[StepRecord], planned: Sequence[StepRecord]) -> BeforeAfter:
    first, last = _untuned(steps), settled_of(planned)
    if len(last) < MIN_STEPS:
        n_needed = int(MIN_STEPS / SETTLED_SHARE)
        n_planned = counted(len(planned), "timed step")
        ran = f"{n_planned} ran under a plan and {len(first)} before it under NCCL's own choice"
        needed = f"{n_needed} of them under a plan and {MIN_STEPS} before it are needed"
        return BeforeAfter([], f"{TOO_FEW}: only {ran}; {needed}", "Train for longer")
    if len(first) >= MIN_STEPS:
        explanation = "this job's steps under NCCL's own choice at its start and the last quarter of those under a plan"
        return replace(_compared(first, last, explanation), remedy=STARTS_DIFFER)
    few = (
        f"only {counted(len(first), 'timed step')} of this job ran under NCCL's own choice before its first plan,"
        f" {MIN_STEPS} are needed"
    )
    others, more = _earlier(jobs, job, first) if len(first) >= MIN_OWN_STEPS else ([], [])
    if not others:
        reason = "starts of earlier jobs with the same training, which count as well, do not make up for it"
        if len(first) < MIN_OWN_STEPS:
            reason = "so few do not tell whether earlier jobs had the same pace"
        return BeforeAfter([], f"{TOO_FEW}: {few}, and {reason}", HOW_TO_COMPARE)
    explanation = (
        "steps under NCCL's own choice at the start of this job and of others with the same fabric, ranks, kind of"
        f" training, collectives and pace ({', '.join(others)}), and the last quarter of this job's under a plan. For"
        f" {few}. Those were other runs, whose computation may differ a little"
    )
    return replace(_compared([*more, *first], last, explanation), remedy=STARTS_DIFFER, other_jobs=tuple(others))


def settled_of(steps: Sequence[Any]) -> list[Any]:
    """The last quarter of `steps`."""
    return list(steps[-max(1, int(len(steps) * SETTLED_SHARE)) :]) if steps else []


def _untuned(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Steps before the first plan, without the very first, which connects and allocates."""
    return [*itertools.takewhile(lambda step: step.epoch == 0, steps)][1:]


def _has_same_pace(own: Sequence[StepRecord], others: Sequence[StepRecord]) -> bool:
    """Whether untuned steps of two jobs take about equally long and, where it is known, compute equally long.

    Else they differ in more than their plans, in their batch size for example.
    """
    return _is_alike(_column(own, "duration_us"), _column(others, "duration_us")) and _is_alike(
        _computation(own), _computation(others)
    )


def _is_alike(own: Array, others: Array) -> bool:
    if not (np.isfinite(own).all() and np.isfinite(others).all()):
        return True
    mine, theirs = np.log(np.maximum(own, 1e-3)), np.log(np.maximum(others, 1e-3))
    spread = 1.48 * float(np.median(np.abs(theirs - np.median(theirs))))
    may_differ = max(SAME_PACE, 3.0 * spread * (1 / len(mine) + 1 / len(theirs)) ** 0.5)
    return bool(abs(np.median(mine) - np.median(theirs)) <= may_differ)


def _earlier(jobs: JobsRead, job: JobRecord, own: Sequence[StepRecord]) -> tuple[list[str], list[StepRecord]]:
    """Jobs before `job` with the same training, the latest first, and as many of their untuned steps as `own` lacks.

    Both are empty where these jobs have too few.
    """
    n_wanted = MIN_STEPS - len(own)
    before = jobs.all[: [one.job_id for one in jobs.all].index(job.job_id)][::-1]
    alike = (
        one for one in before if (one.fabric_id, one.n_ranks, one.stage) == (job.fabric_id, job.n_ranks, job.stage)
    )
    names: list[str] = []
    found: list[StepRecord] = []
    for one in itertools.islice(alike, MAX_EARLIER_JOBS):
        steps = jobs.untuned(one.job_id)
        if steps and _has_same_pace(own, steps) and _have_same_shapes(jobs, job, one):
            names.append(one.job_id)
            found = [*steps, *found]
        if len(found) >= n_wanted:
            return names, found
    return [], []


def _have_same_shapes(jobs: JobsRead, one: JobRecord, other: JobRecord) -> bool:
    shapes = jobs.shapes().get(one.job_id)
    return shapes is not None and shapes == jobs.shapes().get(other.job_id)


def _compared(
    first: Sequence[SummaryStep] | Sequence[StepRecord],
    last: Sequence[SummaryStep] | Sequence[StepRecord],
    explanation: str,
) -> BeforeAfter:
    if not all(float(np.median(_column(some, "duration_us"))) > 0 for some in (first, last)):
        return BeforeAfter([], "nothing to compare: most steps took no time")
    changes = [change("step time", _column(first, "duration_us"), _column(last, "duration_us"))]
    exposed = _column(first, "exposed_us"), _column(last, "exposed_us")
    if np.isfinite(exposed[0]).all() and np.isfinite(exposed[1]).all() and float(np.median(exposed[0])) > 0:
        changes.append(change("exposed communication", *exposed))
        rest = _computation(first), _computation(last)
        if min(float(np.median(some)) for some in rest) > 0:
            computation = change("all but exposed communication", *rest)
            # Fewer channels may leave it more of the device; another batch size would, too, be seen here.
            if computation.is_beyond_noise and abs(computation.percent) > WORTH_TELLING_PERCENT:
                changes.append(computation)
    return BeforeAfter(changes, explanation)


def _computation(steps: Sequence[SummaryStep] | Sequence[StepRecord]) -> Array:
    """Step times without exposed communication (us)."""
    return _column(steps, "duration_us") - _column(steps, "exposed_us")


def _column(steps: Sequence[SummaryStep] | Sequence[StepRecord], name: str) -> Array:
    values = [getattr(step, name) for step in steps]
    return np.array([np.nan if value is None else value for value in values], np.float64)
