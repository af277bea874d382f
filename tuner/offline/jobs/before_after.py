"""Compares step times of NCCL's own choice and the settings in force, or of two runs.

Within a job, the steps of control windows are compared only with those around them. A job's first steps are not
compared with its last: training, the network or the host may have become slower without any plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....store.counted import counted
from ....store.records import Decision, DecisionKind, JobRecord, StepRecord
from ....store.sqlite.database import Store
from ....store.step_times import LEAST_BLOCKS, MedianChange, SideBySide, change
from .summary import RunSummary, SummaryStep

Array = NDArray[Any]

SETTLED_SHARE: Final = 0.25
"""The last quarter of a run is compared: by then the tuner has decided."""
MIN_STEPS: Final = 8
"""Fewer steps than this are not compared."""
WORTH_TELLING_PERCENT: Final = 2.0
HOW_TO_COMPARE: Final = (
    "Run the same training under `zerotune launch --no-agent --summary before.json` and under"
    " `zerotune launch --summary after.json`, then `zerotune report --summary before.json --summary after.json`"
)


@dataclass(frozen=True)
class BeforeAfter:
    """Result of a comparison: of two runs, or within one job, whose `before` is NCCL's own choice."""

    changes: Sequence[MedianChange]
    explanation: str
    """Which steps were compared, or why none were."""
    remedy: str = ""
    """How to get a better comparison."""
    warnings: Sequence[str] = ()
    """A note to be read before the figures."""


def of_summaries(before: RunSummary, after: RunSummary, job_id: str = "") -> BeforeAfter:
    """Compare the last quarters of two runs' steps; the result says why, if they cannot be compared.

    `job_id` is the job of the rest of the page.
    """
    first, last = settled_of(before.steps), settled_of(after.steps)
    if min(len(first), len(last)) < MIN_STEPS:
        counts = f"{before.label} has {len(before.steps)} steps, {after.label} {len(after.steps)}"
        return BeforeAfter([], f"too few steps: {counts}, and the last quarter has to be {MIN_STEPS} or more")
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
    """Jobs of a store; their steps and decisions are read once."""

    def __init__(self, store: Store) -> None:
        self.all = store.jobs()
        """All jobs, the oldest first."""
        self.steps = functools.cache(store.steps)
        self.decisions = functools.cache(lambda job_id: store.decisions(job_id=job_id))


def of_job(jobs: JobsRead, job: JobRecord) -> BeforeAfter:
    """Compare a job's control windows with the steps on either side."""
    steps = jobs.steps(job.job_id)
    if not steps:
        return BeforeAfter([], "too few steps: the store has no step times of this job")
    if not any(step.epoch for step in steps):
        return BeforeAfter([], f"nothing to compare: {without_plan(steps)}")
    controls = {one.epoch for one in jobs.decisions(job.job_id) if one.is_control}
    if not controls:
        why = "not compared: NCCL's own choice never ran beside what was in force; train longer"
        return BeforeAfter([], why, HOW_TO_COMPARE)
    n_windows, whole = _side_by_side("step time", steps, controls, lambda step: step.duration_us)
    if whole is None:
        why = (
            f"NCCL's own choice ran beside what was in force in {counted(n_windows, 'control window')},"
            f" {LEAST_BLOCKS} are needed"
        )
        return BeforeAfter([], f"not yet compared: {why}", f"Train for longer. {HOW_TO_COMPARE}")
    exposed = None
    if all(step.exposed_us for step in steps if step.epoch and step.is_whole):  # fully hidden time has no ratio
        _, exposed = _side_by_side("exposed communication", steps, controls, lambda step: step.exposed_us or 0.0)
    words = f"NCCL's own choice in {n_windows:,} control windows, each against the four steps on either side of it"
    return BeforeAfter([one for one in (whole, exposed) if one is not None], words)


def _side_by_side(
    name: str, steps: Sequence[StepRecord], controls: set[int], of: Callable[[StepRecord], float]
) -> tuple[int, MedianChange | None]:
    """Number of windows, and the changes from NCCL's own choice to the settings in force, if they are known."""
    found = SideBySide()
    for step in steps:
        found.add(msgspec.structs.replace(step, duration_us=of(step)), is_control=step.epoch in controls)
    saved = found.saved()
    if saved is None:
        return found.n_windows, None
    percents = (-100 * share for share in (saved.share, saved.high_share, saved.low_share))
    own_us = saved.own_us
    return found.n_windows, MedianChange(name, own_us, own_us * (1 - saved.share), *percents)


def without_plan(steps: Sequence[StepRecord]) -> str:
    """The state, in words, of a job that has steps, none of which ran under a plan."""
    seen, n_steps = {0, *(step.step for step in steps)}, 1 + max(step.step for step in steps)  # the first has no time
    known = "all" if len(seen) == n_steps else f"{len(seen):,} of them"
    return f"no plan was adopted in {counted(n_steps, 'step')}, {known} heard of by a daemon: NCCL's own choice ran"


def is_of_pace(decision: Decision) -> bool:
    """Whether a decision reports that training itself, or the network, became faster or slower."""
    return decision.is_of_job and decision.kind in (DecisionKind.pace, DecisionKind.regime, DecisionKind.keep)


def settled_of(steps: Sequence[Any]) -> list[Any]:
    """The last quarter of `steps`."""
    return list(steps[-max(1, int(len(steps) * SETTLED_SHARE)) :]) if steps else []


def _compared(
    first: Sequence[SummaryStep], last: Sequence[SummaryStep], explanation: str
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
            # Fewer channels may leave computation more of the device; another batch size would change it, too.
            if computation.is_beyond_noise and abs(computation.percent) > WORTH_TELLING_PERCENT:
                changes.append(computation)
    return BeforeAfter(changes, explanation)


def _computation(steps: Sequence[SummaryStep]) -> Array:
    """Step times without exposed communication (us)."""
    return _column(steps, "duration_us") - _column(steps, "exposed_us")


def _column(steps: Sequence[SummaryStep], name: str) -> Array:
    values = [getattr(step, name) for step in steps]
    return np.array([np.nan if value is None else value for value in values], np.float64)
