"""Run summaries: the JSON files of `launch --summary`, one for each run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ....store.errors import UserError, reason
from ....store.foreign.regular_file import read_file
from ....store.records import JobRecord
from ....store.sqlite.database import Store
from .finding import job_of

MAX_FILE_BYTES: Final = 2**29
"""A summary has some 150 bytes per step."""


NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]


class SummaryStep(msgspec.Struct, frozen=True):
    """One step of a run summary."""

    step: Count
    duration_us: NotNegative
    exposed_us: NotNegative | None = None
    loss_hex: str = ""
    epoch: int = 0


class RunSummary(msgspec.Struct, frozen=True):
    """One run for the before-and-after comparison, as a JSON file."""

    steps: tuple[SummaryStep, ...]
    label: str = ""
    """Name of the run in pictures; the file's name if it has none."""
    emulated: bool = False
    fabric: str | None = None
    n_disagreements: Count | None = None
    n_ranks: Count = 0
    job_id: str = ""
    """Id of the job in the store; empty if no daemon recorded it."""


def read_summary(path: Path) -> RunSummary:
    """A run summary; UserError if the file is none."""
    try:
        summary = msgspec.json.decode(read_file(path, MAX_FILE_BYTES), type=RunSummary)
        return summary if summary.label else msgspec.structs.replace(summary, label=path.stem)
    except OSError as error:
        raise UserError(f"cannot read the run summary {path}: {reason(error)}", "check the path") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a run summary: {error}", "use one written by --summary") from error


def check_alike(before: RunSummary, after: RunSummary) -> None:
    """Check that two runs differ only in their settings; otherwise raise UserError."""
    if 0 not in (before.n_ranks, after.n_ranks) and before.n_ranks != after.n_ranks:
        raise UserError(f"one run had {before.n_ranks} ranks, the other {after.n_ranks}", "compare runs of one size")
    places = [_place(one) for one in (before, after)]
    if places[0] != places[1]:
        raise UserError(f"one run was on {places[0]}, the other on {places[1]}", "compare runs on one fabric")


def _place(run: RunSummary) -> str:
    return f"emulated fabric {run.fabric}" if run.emulated else "the real NCCL"


def compared_job(store: Store, job_id: str | None, run: RunSummary) -> JobRecord:
    """The job of a page about the last `run`: the run's own, if the store has it.

    Raises:
        UserError: `job_id` names another job than the run's, or there is none.
    """
    if job_id is not None:
        job_id = job_of(store, job_id).job_id
    if run.job_id and job_id not in (None, run.job_id):
        raise UserError(f"{run.label} is of job {run.job_id}, not of {job_id}", "leave out --job, or --summary")
    is_known = run.job_id in {one.job_id for one in store.jobs()}
    return job_of(store, run.job_id if is_known else job_id)
