"""Reads a trace of any format as a table of collectives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ....agent.nccl import fabric as fabrics
from ....store.errors import TraceError, UserError
from ....store.records import Collective
from ....store.trace_format import TRACE_SUFFIX
from ...traces import Trace, read_trace
from ...traces.own.jobs import OneStart, one_start
from ...traces.own.reader import read_own, trace_files
from .table import CollectiveTable, from_own, from_trace

OWN_FORMAT: Final = "zerotune"


def load_table(path: Path, fabric: str | None = None, **options: Any) -> CollectiveTable:
    """The table of `read_table`, which takes the same arguments."""
    return read_table(path, fabric, **options)[1]


def read_table(
    path: Path,
    fabric: str | None = None,
    *,
    format_name: str | None = None,
    collective: Collective | None = None,
    job_id: str | None = None,
    likely_job_id: str = "",
) -> tuple[Trace, CollectiveTable]:
    """A trace, and its collectives joined over its ranks: one row per collective.

    Args:
        fabric: name or path of a fabric file, if the trace does not describe its machine.
        collective: the collective that ran, if the trace does not name it.
        job_id: the job to read, in a folder with several jobs.
        likely_job_id: job to take among several if `job_id` is None.

    Raises:
        TraceError: it is no trace, or a damaged one.
        UserError: the trace ran on another fabric than `fabric`, or has no job `job_id`.
    """
    described = fabrics.load(fabric) if fabric is not None else None
    if format_name is None and _has_own_suffix(path):
        format_name = OWN_FORMAT
    trace = read_trace(path, format_name, collective=collective)
    if trace.format_name == OWN_FORMAT:
        table = _own(one_start(trace_files(path), job_id, likely_job_id))
    else:
        trace.refuse_job(job_id)
        table = from_trace(trace, fabric=described)
    if described is None:
        return trace, table
    own = table.fabric.get("emulated")
    if own and table.fabric_id != described.fabric_id:
        raise UserError(
            f"the trace ran on fabric {own}, not on {described.name}",
            f"drop --fabric, or ask for --on-fabric {described.name}",
        )
    fabric_id = table.fabric_id or described.fabric_id
    return trace, replace(table, fabric_id=fabric_id, fabric=described.describe(), described=described)


def _has_own_suffix(path: Path) -> bool:
    """Whether all files have our traces' suffix; truncated ones may lack our format's beginning."""
    try:
        files = [file for file in path.iterdir() if not file.name.startswith(".")] if path.is_dir() else [path]
        return bool(files) and all(file.suffix == TRACE_SUFFIX and file.is_file() for file in files)
    except OSError:
        return False  # reading it will raise the reason


def _own(start: OneStart) -> CollectiveTable:
    """The table of our own traces, one file per rank; damaged files get a note if others can be used."""
    traces, damaged = [], list(start.damaged)
    for file in start.files:
        try:
            traces.append(read_own(file.path))
        except TraceError as error:
            damaged.append(error)
    if not traces:
        raise damaged[0]
    notes = [f"{note[0].upper()}{note[1:]}." for note in start.notes]
    if damaged:
        which = damaged[0].problem + (f", and {len(damaged) - 1:,} more" if len(damaged) > 1 else "")
        n_files = len(start.files) + len(start.damaged)
        notes.append(f"Left out {len(damaged):,} of {n_files:,} files: {which}.")
    table = from_own(traces)
    return replace(table, notes=(*notes, *table.notes))
