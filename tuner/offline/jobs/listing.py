"""Lists a store's jobs: time, kind of training, end, gain."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Final

import msgspec

from ....store.records import JobRecord
from ....store.sqlite.database import Store
from ...client.holders import living_holder
from .before_after import BeforeAfter, JobsRead, of_job, without_plan


class JobEnd(enum.Enum):
    """How a job ended."""

    silent = "silent"
    """No rank has greeted a daemon: the job is still loading, or ended before."""
    running = "running"
    ended = "ended"
    failed = "failed"
    """An exception ended the script of one of its ranks."""
    lost = "lost"
    """One of its ranks fell silent."""
    unseen = "unseen"
    """No daemon ran when it ended, so how it ended is unknown."""
    unwatched = "unwatched"
    """No daemon runs that would see its end, so it may still train."""


STILL_OPEN: Final = (JobEnd.silent, JobEnd.running, JobEnd.unwatched)
"""Values of jobs that may not have ended."""


class GainKind(enum.Enum):
    """Whether a job's gain is known."""

    measured = "measured"
    """Steps took less or more time than under NCCL's own choice, beyond noise."""
    within_noise = "within_noise"
    no_plan = "no_plan"
    """NCCL's own choice ran in all known steps."""
    unknown = "unknown"


class Gain(msgspec.Struct, frozen=True):
    """Time saved per step against NCCL's own choice; negative if steps became slower."""

    kind: GainKind
    saved_us: float | None = None
    """Difference of medians."""
    saved_percent: float | None = None
    low_percent: float | None = None
    """Lower end of the 95 % interval of the change, in percent of step time."""
    high_percent: float | None = None
    why: str = ""
    """Which steps were compared, or why none were and what a comparison needs."""


class JobLine(msgspec.Struct, frozen=True):
    """One job as `zerotune jobs` lists it."""

    job_id: str
    name: str
    started_at_s: float
    ended_at_s: float | None
    end: JobEnd
    stage: str
    n_ranks: int
    n_steps: int
    fabric_id: str
    emulated: str
    """Name of the emulated fabric; empty: NCCL was real."""
    gain: Gain
    failure: str = ""
    """The first rank whose script ended by an exception, and that exception's type."""


def list_jobs(path: Path, *, limit: int, all_kinds: bool = False, only_over: bool = False) -> list[JobLine]:
    """The newest jobs of a store that trained, the newest first.

    `all_kinds` adds those that recorded no step, such as sweeps and imports. `only_over` leaves out jobs that run or
    may still run.
    """
    with Store.open(path, read_only=True) as store:
        is_written = has_writer(path)
        jobs, last_steps = JobsRead(store), store.last_steps()
        lines: list[JobLine] = []
        for job in reversed(jobs.all):
            if len(lines) == limit:
                break
            is_open = end_of(job, is_written=is_written) in STILL_OPEN
            if not (is_open and only_over) and (all_kinds or is_open or job.job_id in last_steps):
                lines.append(_line(store, jobs, job, 1 + last_steps.get(job.job_id, -1), is_written=is_written))
        return lines


def end_of(job: JobRecord, *, is_written: bool) -> JobEnd:
    """How a job ended; `is_written` says whether a process has its store open for writing."""
    if job.failure and not job.failure.endswith(": KeyboardInterrupt"):
        return JobEnd.failed
    if job.is_lost:
        return JobEnd.unseen if job.ended_at_s is None else JobEnd.lost
    if job.ended_at_s is not None:
        return JobEnd.ended
    if job.training and not job.fabric_id:
        return JobEnd.silent
    return JobEnd.running if is_written else JobEnd.unwatched


def gain_of(jobs: JobsRead, job: JobRecord) -> Gain:
    """The gain by a job's decisions."""
    steps = jobs.steps(job.job_id)
    if steps and not any(step.epoch for step in steps):
        return Gain(GainKind.no_plan, why=without_plan(steps))
    return as_gain(of_job(jobs, job))


def as_gain(found: BeforeAfter) -> Gain:
    """The gain in step time from a comparison."""
    if not found.changes:
        return Gain(GainKind.unknown, why=found.explanation)
    change = found.changes[0]
    return Gain(
        GainKind.measured if change.is_beyond_noise else GainKind.within_noise,
        change.before_us - change.after_us,
        -change.percent,
        -change.high_percent,
        -change.low_percent,
        found.explanation,
    )


def _line(store: Store, jobs: JobsRead, job: JobRecord, n_steps: int, *, is_written: bool) -> JobLine:
    return JobLine(
        job_id=job.job_id,
        name=job.name,
        started_at_s=job.started_at_s,
        ended_at_s=job.ended_at_s,
        end=end_of(job, is_written=is_written),
        stage=job.stage.name,
        n_ranks=job.n_ranks,
        n_steps=n_steps,
        fabric_id=job.fabric_id,
        emulated=str(store.fabrics().get(job.fabric_id, {}).get("emulated", "")),
        gain=gain_of(jobs, job),
        failure=job.failure,
    )


def has_writer(path: Path) -> bool:
    """Whether a living process has the store open for writing."""
    return living_holder(Path(os.path.realpath(path) + ".lock")) is not None
