"""Exports a job's results: our plan file, other tuners' tables, measurements as CSV or Parquet."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...store.atomic_file import users_file
from ...store.counted import counted
from ...store.errors import UserError
from ...store.plan_file import PlanFile, write_plan
from ...store.records import (
    BASELINE,
    Algorithm,
    Collective,
    Decision,
    DecisionKind,
    Outcome,
    Phase,
    Plan,
    PlanRow,
    Protocol,
    Source,
    TimingSource,
    size_class_range,
)
from ...store.sqlite.database import MEASUREMENT, UNKNOWN, Store
from ..decided import decisions_that_ran, proven_decisions, settled_decisions
from .jobs.finding import named_job
from .tuner_tables import write_table

_SUFFIXES: Final = {
    ".json": ("plan", "ncclx-json", "chrome"),
    ".csv": ("nvidia-csv", "rccl-csv", "ncclx-csv", "measurements"),
    ".parquet": ("measurements",),
    ".gz": ("chrome",),
    ".env": ("environment",),
    **dict.fromkeys((".xls", ".xlsx", ".ods", ".db", ".sqlite", ".html", ".zip"), ()),
}
"""Suffixes of formats -> the exports that are written in them."""
_STRICT: Final = ("measurements", "chrome")
"""Other programs choose a reader for these by the suffix, so unknown suffixes are refused."""


def check_suffix(out: Path, to: str) -> None:
    """Refuse a file name whose suffix belongs to another format, with a UserError."""
    suffix = out.suffix.lower()
    fitting = [one for one, formats in _SUFFIXES.items() if to in formats]
    if suffix in ("", *fitting) or (suffix not in _SUFFIXES and to not in _STRICT):
        return
    remedy = f"name a file that ends in {' or '.join(fitting)}, or one without a suffix"
    raise UserError(f"{to} is not written as {out.suffix}", remedy)


def learned_plan(store: Store, job_id: str | None = None) -> tuple[PlanFile, list[str]]:
    """The plan from the decisions of `job_id`, and remarks on what it leaves out.

    If `job_id` is None, the job is the newest that adopted a plan, or else the newest with decisions.

    Raises:
        UserError: there is no such job, or none of its decisions came into force.
    """
    jobs = {job.job_id: job for job in store.jobs()}
    if job_id is not None:
        job_id = named_job(store, job_id).job_id
    tuned = [name for name in list(jobs)[::-1] if store.decisions(job_id=name, limit=1)]
    if not tuned:
        raise UserError(f"no decisions are recorded in {store.path}", "run a job with the tuner first")
    if job_id is not None and job_id not in tuned:
        raise UserError(f"nothing was decided in job {job_id}", f"name a job that was tuned, as {tuned[0]}")
    named = tuned if job_id is None else [job_id]
    found = next((name for name in named if store.highest_epoch(name) != 0), named[0])
    decisions, fabric_id = store.decisions(job_id=found), jobs[found].fabric_id
    ran = decisions_that_ran(decisions, store.highest_epoch(found))
    in_force, decided = settled_decisions(ran), settled_decisions(decisions)
    if not in_force:
        what = (
            "what it put on trial has no verdict"
            if not decided
            else "no step is recorded under a plan with what it decided"
        )
        longer = "train longer"
        if any(one.kind == DecisionKind.shadow for one in decisions):
            what, longer = "all was decided in shadow, and nothing carried out", "train without --shadow"
        raise UserError(f"job {found} leaves nothing to export: {what}", f"{longer}, or name another job with --job")
    plan = plan_of(ran)
    n_newer = tuned.index(found) if job_id is None else 0
    n_left_out = sum(
        one.candidate != (in_force[key].candidate if key in in_force else BASELINE) for key, one in decided.items()
    )
    proven = proven_decisions(ran)
    n_leads = sum(
        one.candidate != (proven[key].candidate if key in proven else BASELINE) for key, one in in_force.items()
    )
    emulated = str(store.fabrics().get(fabric_id, {}).get("emulated", ""))
    file = PlanFile(plan, fabric_id=fabric_id, job_id=found, emulated=emulated)
    return file, _remarks(file, n_newer, n_left_out, n_leads)


def _remarks(file: PlanFile, n_newer: int, n_left_out: int, n_leads: int) -> list[str]:
    """Remarks about a plan: newer jobs that adopted none, and decisions that are not in it."""
    remarks = []
    if n_newer:
        jobs, them = ("1 newer job", "it") if n_newer == 1 else (f"{n_newer} newer jobs", "them")
        remarks.append(f"Passed over: {jobs}, since no step of {them} is recorded under a plan; --job names another.")
    if n_left_out:
        decisions, them = ("1 decision", "it") if n_left_out == 1 else (f"{n_left_out} decisions", "them")
        remarks.append(
            f"Left out: {decisions} of job {file.job_id}, since no step is recorded under a plan with {them}."
        )
    if n_leads:
        settings, are = ("1 setting", "is") if n_leads == 1 else (f"{n_leads} settings", "are")
        remarks.append(
            f"Left out: {settings} that ran in most steps of job {file.job_id}, but {are} not proven to be faster"
            " (`zerotune explain` shows them)."
        )
    if not file.plan.rows:
        remarks.append("There is no row in it: NCCL's own choice runs everywhere.")
    if file.emulated:
        remarks.append(f"Learned on the emulated fabric {file.emulated}: it says nothing about real hardware.")
    return remarks


def plan_of(decisions: Iterable[Decision]) -> Plan:
    """Proven settings as plan rows; neighbouring size classes with one setting become one row."""
    settled = proven_decisions(decisions)
    rows: list[PlanRow] = []
    for key in sorted(settled):
        decision = settled[key]
        if decision.candidate.is_baseline:
            continue
        low, high = size_class_range(key.size_class)
        place = (key.communicator, key.collective, key.phase)
        row = PlanRow(*place, low, high, decision.candidate, decision.reason, decision.model_id)
        before = rows[-1] if rows else None
        if before is not None and _continues(before, row):
            row = PlanRow(*place, before.min_bytes, high, row.candidate, row.reason, row.model_id)
            rows.pop()
        rows.append(row)
    has_post_step = any(key.phase is Phase.post_step_gather for key in settled)
    return Plan(epoch=1, rows=tuple(rows), gathers_after_step=has_post_step)


def export_plan(store_path: Path, out: Path, job_id: str | None = None) -> list[str]:
    """Write our plan file; returns remarks for the user.

    Raises:
        UserError: as `learned_plan`, or the file cannot be written.
    """
    with Store.open(store_path, read_only=True) as store:
        file, notes = learned_plan(store, job_id)
    write_plan(out, file)
    remarks = [
        f"{counted(len(file.plan.rows), 'row')} of job {file.job_id} written to {out};"
        f" use: zerotune launch --plan {out} -- ...",
        *notes,
    ]
    return remarks


def export_table(to: str, store_path: Path, out: Path, job_id: str | None = None) -> list[str]:
    """Write another tuner's table; returns remarks for the user.

    Args:
        to: one of `tuner_tables.FORMATS`.

    Raises:
        UserError: as `learned_plan` and `write_table`.
    """
    with Store.open(store_path, read_only=True) as store:
        file, notes = learned_plan(store, job_id)
    whose = f" of job {file.job_id}" if to == "nvidia-csv" else ""
    return [*write_table(to, file.plan.rows, out, whose), *notes]


def export_measurements(store_path: Path, out: Path, job_id: str | None = None) -> list[str]:
    """Write measurements with names instead of numbers, as Parquet if `out` ends in .parquet, else as CSV.

    Unknown values are empty in CSV and null in Parquet. Each row names its job and its fabric. Without `job_id`, all
    jobs are written. Returns remarks for the user.

    Raises:
        UserError: there is no such job or nothing measured, or the file cannot be written.
    """
    with Store.open(store_path, read_only=True) as store:
        if job_id is not None:
            job_id = named_job(store, job_id).job_id
        chosen = [owner for owner in store.measured() if job_id in (None, owner[0])]
        if not chosen:
            whose = "" if job_id is None else f" of job {job_id!r}"
            raise UserError(f"no measurements{whose} are recorded in {store.path}", "run a job or a sweep first")
        blocks = (_columns(store.measurements(fabric, job, chunk_bytes=None), job, fabric) for job, fabric in chosen)
        write = _write_parquet if out.suffix.lower() == ".parquet" else _write_csv
        n_rows = write(blocks, out)
    n_jobs = len({job for job, _ in chosen})
    kind = "" if out.suffix else " as CSV"
    return [f"{counted(n_rows, 'measurement')} of {counted(n_jobs, 'job')} written to {out}{kind}."]


_ENUMS: Final = {
    "collective": Collective,
    "phase": Phase,
    "source": Source,
    "outcome": Outcome,
    "timing_source": TimingSource,
    "algorithm": Algorithm,
    "protocol": Protocol,
}


_OF_JOB: Final = ("job_id", "fabric_id")
_FORMULA: Final = re.compile("(^|[;,|\t])(?=[ ]*[=+@\t\r\n\uff1d\uff0b\uff0d\uff20-])")
"""The full-width characters are those that East Asian spreadsheets accept, too."""


def _columns(found: NDArray[Any], job_id: str, fabric_id: str) -> dict[str, list[Any]]:
    named = {name: _named(name, found[name]) for name in found.dtype.names or ()}
    return named | {"job_id": [job_id] * len(found), "fabric_id": [fabric_id or None] * len(found)}


def _no_formula(cell: Any) -> Any:
    """A cell for spreadsheets: an apostrophe makes text of anything that begins like a formula.

    This also applies behind characters that some spreadsheets read as the end of a cell.
    """
    return _FORMULA.sub(r"\1'", cell) if isinstance(cell, str) else cell


def _named(name: str, values: NDArray[Any]) -> list[Any]:
    """A column of Python values; None = unknown."""
    kind = _ENUMS.get(name)
    if kind is not None:
        names = {int(value): kind(value).name if value != UNKNOWN else None for value in np.unique(values)}
        return [names[value] for value in values.tolist()]
    if values.dtype.kind == "f":
        return [None if value != value else value for value in values.tolist()]
    return list(values.tolist())


def _write_csv(blocks: Iterable[dict[str, list[Any]]], out: Path) -> int:
    n_rows = 0
    with users_file(out) as partial, partial.open("w", encoding="utf-8", newline="") as text:
        writer = csv.writer(text)
        writer.writerow([*(MEASUREMENT.names or ()), *_OF_JOB])
        for columns in blocks:
            of_job = {name: list(map(_no_formula, columns[name])) for name in _OF_JOB}
            writer.writerows(zip(*(columns | of_job).values(), strict=True))
            n_rows += len(columns["job_id"])
    return n_rows


def _write_parquet(blocks: Iterable[dict[str, list[Any]]], out: Path) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            "Parquet needs pyarrow, which is not installed", "pip install 'zerotune[parquet]', or name a .csv file"
        ) from error
    # Names repeat, so a dictionary stores each once.
    name = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    numbers = {"f": pyarrow.float64(), "i": pyarrow.int64(), "u": pyarrow.int64(), "b": pyarrow.bool_()}
    types = {one: name if one in _ENUMS else numbers[MEASUREMENT[one].kind] for one in MEASUREMENT.names or ()}
    schema = pyarrow.schema(types | dict.fromkeys(_OF_JOB, name))
    n_rows = 0
    with users_file(out) as partial, pyarrow.parquet.ParquetWriter(partial, schema) as writer:
        for columns in blocks:
            writer.write_table(pyarrow.table(columns, schema))
            n_rows += len(columns["job_id"])
    return n_rows


def _continues(before: PlanRow, row: PlanRow) -> bool:
    same = (before.communicator, before.collective, before.phase) == (row.communicator, row.collective, row.phase)
    return same and before.candidate == row.candidate and before.max_bytes + 1 == row.min_bytes
