"""What a report tells, read from the store and from run summaries; no HTML and no pictures here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from store.database import Store
from store.errors import UserError
from store.records import Decision, DecisionKey, JobRecord, Outcome, StepRecord, TimingSource
from tuner.comparison import Comparison, Medians, compare, medians
from tuner.replay.loading import load_table
from tuner.replay.table import CollectiveTable

Array = NDArray[Any]

SETTLED_SHARE: Final = 0.25
"""The last quarter of a run is compared: by then the tuner has made up its mind."""
MIN_STEPS: Final = 8
"""Fewer steps than this are not compared."""
_BLOCK_STEPS: Final = 8
_N_RESAMPLES: Final = 1000


class SummaryStep(msgspec.Struct, frozen=True):
    """One step of a run summary."""

    step: int
    duration_us: float
    exposed_us: float | None = None
    loss_hex: str = ""
    epoch: int = 0


class Summary(msgspec.Struct, frozen=True):
    """One run for the before-and-after comparison, as a JSON file."""

    steps: tuple[SummaryStep, ...]
    label: str = ""
    """What the pictures call the run; the file's name where it does not say."""
    emulated: bool = False
    fabric: str | None = None
    n_disagreements: int | None = None


@dataclass(frozen=True)
class Change:
    """Medians before and after, and the 95 % interval of the change in percent."""

    name: str
    before_us: float
    after_us: float
    percent: float
    low_percent: float
    high_percent: float

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the interval excludes no change at all."""
        return self.low_percent > 0 or self.high_percent < 0


@dataclass(frozen=True)
class Facts:
    """Everything the page shows about one job."""

    job: JobRecord
    fabric: dict[str, str | int | float | bool]
    steps: Sequence[StepRecord]
    decisions: Sequence[Decision]
    measurements: Array
    before: Summary | None
    after: Summary | None
    changes: Sequence[Change]
    comparison: str
    """What was compared with what, in words."""
    here: Medians
    """Measured medians of this job."""
    everywhere: Medians
    """Measured medians of all jobs on its fabric."""
    traced: Sequence[CollectiveTable] = ()
    """Traces of the runs before and after, for timelines."""

    @property
    def emulated(self) -> str:
        """Name of the emulated fabric; empty when the NCCL was real."""
        return str(self.fabric.get("emulated", ""))

    def settled(self) -> dict[DecisionKey, Decision]:
        """The last word on every key, explorations left out."""
        return {one.key: one for one in self.decisions if one.kind != "explore"}

    def against_own(self, decision: Decision) -> Comparison:
        """A decision's setting against NCCL's own choice."""
        return compare(decision, self.here, self.everywhere)

    @property
    def n_steps(self) -> int:
        """Steps begun; a step's time runs from the end of the one before, so that a first step has none."""
        return 1 + max((step.step for step in self.steps), default=-1)

    def n_explored(self) -> int:
        """Settings tried out on trial."""
        return sum(one.kind == "explore" for one in self.decisions)


def gather(
    store_path: Path, job_id: str | None = None, summaries: Sequence[Path] = (), traces: Sequence[Path] = ()
) -> Facts:
    """The facts about `job_id` (the newest job when None); `summaries` are the runs before and after.

    `traces` are their --log-trace folders, if they were logged.

    Raises:
        StoreError: there is no usable store.
        UserError: no such job, or a summary is not one.
        TraceError: a trace is not one.
    """
    if not store_path.exists():
        raise UserError(f"there is no store at {store_path}", "name it with --store, or run a job first")
    runs = [read_summary(path) for path in summaries]
    if len(runs) not in (0, 2):
        raise UserError(f"{len(runs)} run summaries", "give two: before and after")
    with Store.open(store_path, read_only=True) as store:
        jobs = {one.job_id: one for one in store.jobs()}
        if not jobs:
            raise UserError(f"the store at {store_path} has no jobs", "run one with `zerotune launch`")
        if job_id is not None and job_id not in jobs:
            raise UserError(f"the store has no job {job_id!r}", f"use one of {', '.join(list(jobs)[-3:])}")
        job = jobs[job_id] if job_id is not None else list(jobs.values())[-1]
        steps = store.steps(job.job_id)
        decisions = store.decisions(job_id=job.job_id)
        measurements = store.measurements(job_id=job.job_id)
        fabric = store.fabrics().get(job.fabric_id, {})
        here, everywhere = (medians(store.statistics(job.fabric_id, of)) for of in (job.job_id, None))
    before, after = runs or (None, None)
    changes, comparison = _compare(before, after, steps)
    traced = [load_table(path) for path in traces]
    return Facts(
        job, fabric, steps, decisions, measurements, before, after, changes, comparison, here, everywhere, traced
    )


def read_summary(path: Path) -> Summary:
    """A run summary.

    Raises:
        UserError: it cannot be read, or is not one.
    """
    try:
        summary = msgspec.json.decode(path.read_bytes(), type=Summary)
        return summary if summary.label else msgspec.structs.replace(summary, label=path.stem)
    except OSError as error:
        raise UserError(f"cannot read the run summary {path}: {error.strerror}", "check the path") from error
    except msgspec.MsgspecError as error:
        raise UserError(f"{path} is not a run summary: {error}", "use one written by --summary") from error


def _compare(before: Summary | None, after: Summary | None, steps: Sequence[StepRecord]) -> tuple[list[Change], str]:
    if before is not None and after is not None:
        first = settled_of(before.steps)
        last = settled_of(after.steps)
        words = f"the last quarter of two runs, {before.label} and {after.label}"
    else:
        untuned = [step for step in steps if step.epoch == 0][1:]
        first, last = untuned, settled_of([step for step in steps if step.epoch > 0])
        words = "this job's steps under NCCL's own choice at its start and the last quarter of those under a plan"
    if min(len(first), len(last)) < MIN_STEPS:
        return [], "too few steps to compare"
    changes = [_change("step time", _column(first, "duration_us"), _column(last, "duration_us"))]
    exposed = _column(first, "exposed_us"), _column(last, "exposed_us")
    if np.isfinite(exposed[0]).all() and np.isfinite(exposed[1]).all() and float(np.median(exposed[0])) > 0:
        changes.append(_change("exposed communication", *exposed))
    return changes, words


def settled_of(steps: Sequence[Any]) -> list[Any]:
    """The last quarter of `steps`."""
    return list(steps[-max(1, int(len(steps) * SETTLED_SHARE)) :]) if steps else []


def _column(steps: Sequence[SummaryStep] | Sequence[StepRecord], name: str) -> Array:
    values = [getattr(step, name) for step in steps]
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _change(name: str, before: Array, after: Array) -> Change:
    """Medians, and a bootstrap over blocks of steps (neighbouring steps are not independent)."""
    chance = np.random.default_rng(0)
    ratios = _resampled_medians(before, chance), _resampled_medians(after, chance)
    low, high = np.percentile(100 * (ratios[1] / ratios[0] - 1), [2.5, 97.5])
    before_us, after_us = float(np.median(before)), float(np.median(after))
    return Change(name, before_us, after_us, 100 * (after_us / before_us - 1), float(low), float(high))


def _resampled_medians(values: Array, chance: np.random.Generator) -> Array:
    length = min(_BLOCK_STEPS, len(values))
    n_blocks = -(-len(values) // length)
    starts = chance.integers(0, len(values) - length + 1, (_N_RESAMPLES, n_blocks, 1))
    taken = values[starts + np.arange(length)].reshape(_N_RESAMPLES, -1)[:, : len(values)]
    return np.asarray(np.median(taken, axis=1))


def trust(facts: Facts) -> list[tuple[str, str]]:
    """(what, how far it can be trusted) in plain words."""
    lines = []
    if facts.emulated:
        lines.append(
            (
                "Emulated",
                f"Every time on this page is the virtual clock of the emulated fabric {facts.emulated}. It shows "
                "that the loop works; it is no statement about NCCL's performance on any real machine.",
            )
        )
    lines.append(("Comparison", facts.comparison[0].upper() + facts.comparison[1:] + "."))
    for run in (facts.before, facts.after):
        if run is not None and run.n_disagreements is not None:
            lines.append((f"Agreement, {run.label}", f"{run.n_disagreements} calls on which ranks disagreed."))
    losses = [[step.loss_hex for step in run.steps if step.loss_hex] for run in (facts.before, facts.after) if run]
    if len(losses) == 2 and all(losses):
        verdict = "identical to the last bit" if losses[0] == losses[1] else "DIFFERENT"
        lines.append(("Loss", f"Loss curves {verdict} over the compared runs."))
    measured = facts.measurements
    if len(measured):
        n_outliers = int(np.count_nonzero(measured["outcome"] == Outcome.outlier))
        lines.append(("Measurements", f"{len(measured):,} joined over ranks, {n_outliers:,} marked as outliers."))
        sources = {TimingSource(int(one)).name for one in np.unique(measured["timing_source"])}
        lines.append(("Timing", f"Durations from: {', '.join(sorted(sources))}."))
    else:
        lines.append(("Measurements", "None are recorded for this job."))
    return lines
