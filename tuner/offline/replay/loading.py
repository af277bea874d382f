"""A trace of any format as replay's table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from zerotune.agent.nccl import fabric as fabrics
from zerotune.store.errors import TraceError, UserError
from zerotune.store.records import Collective
from zerotune.store.trace_format import TRACE_SUFFIX
from zerotune.tuner.offline.replay.table import CollectiveTable, from_own, from_trace
from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.own.jobs import OneStart, one_start
from zerotune.tuner.traces.own.reader import read_own, trace_files

OWN_FORMAT: Final = "zerotune"


def load_table(
    path: Path,
    fabric: str | None = None,
    *,
    format_name: str | None = None,
    collective: Collective | None = None,
    job_id: str | None = None,
    likely_job_id: str = "",
) -> CollectiveTable:
    """The collectives of a trace, joined over its ranks.

    Args:
        path: a trace file, or a folder with one file per rank.
        fabric: name or path of a fabric file, where the trace does not describe its machine.
        format_name: read it as this format; None: found out.
        collective: what was run, where the trace does not say it.
        job_id: whose files are read, in a folder with several jobs.
        likely_job_id: job to take among several where `job_id` is None.

    Returns:
        One row per collective.

    Raises:
        TraceError: it is no trace, or a damaged one.
        FabricError: there is no such fabric.
        UserError: the trace ran on another fabric than `fabric`, or has no job `job_id`.
    """
    described = fabrics.load(fabric) if fabric is not None else None
    if path.is_file() and path.suffix == TRACE_SUFFIX:  # also where it is cut before it shows that it is ours
        format_name = format_name or OWN_FORMAT
    trace = read_trace(path, format_name, collective=collective)
    if trace.format_name == OWN_FORMAT:
        table = _own(one_start(trace_files(path), job_id, likely_job_id))
    else:
        trace.refuse_job(job_id)
        table = from_trace(trace, fabric=described)
    if described is None:
        return table
    own = table.fabric.get("emulated")
    if own and table.fabric_id != described.fabric_id:
        raise UserError(
            f"the trace ran on fabric {own}, not on {described.name}",
            f"drop --fabric, or ask for --on-fabric {described.name}",
        )
    return replace(table, fabric_id=table.fabric_id or described.fabric_id, fabric=described.describe())


def _own(start: OneStart) -> CollectiveTable:
    """The table of our own traces, one file a rank; damaged files get a note while the others are used."""
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
