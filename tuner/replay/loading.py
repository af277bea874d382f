"""A trace of any format as replay's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from agent.nccl import fabric as fabrics
from store.errors import TraceError, UserError
from store.records import Collective
from tuner.replay.table import CollectiveTable, from_own, from_trace
from tuner.traces import read_trace
from tuner.traces.own import read_own, trace_files

OWN_FORMAT: Final = "zerotune"


def load_table(
    path: Path,
    fabric: str | None = None,
    *,
    format_name: str | None = None,
    collective: Collective | None = None,
) -> CollectiveTable:
    """The collectives of the trace at `path`; `fabric` describes the machine where the trace does not.

    `format_name` forces a format, `collective` says what was run where the files do not.

    Raises:
        TraceError: it is no trace, or a broken one.
        FabricError: there is no such fabric.
        UserError: the trace describes its own, and it is another.
    """
    described = fabrics.load(fabric) if fabric is not None else None
    trace = read_trace(path, format_name, collective=collective)
    table = _own(trace_files(path)) if trace.format_name == OWN_FORMAT else from_trace(trace, fabric=described)
    if described is None:
        return table
    own = table.fabric.get("emulated")
    if own and table.fabric_id != described.fabric_id:
        raise UserError(
            f"the trace ran on fabric {own}, not on {described.name}",
            f"drop --fabric, or ask for --on-fabric {described.name}",
        )
    return replace(table, fabric_id=table.fabric_id or described.fabric_id, fabric=described.describe())


def _own(files: Sequence[Path]) -> CollectiveTable:
    """Our own traces, one file a rank; of several, a damaged one is told of while the others are used."""
    traces, damaged = [], []
    for file in files:
        try:
            traces.append(read_own(file))
        except TraceError as error:
            damaged.append(error)
    if not traces:
        raise damaged[0]
    table = from_own(traces)
    if not damaged:
        return table
    which = damaged[0].problem + (f", and {len(damaged) - 1:,} more" if len(damaged) > 1 else "")
    return replace(table, notes=(f"Left out {len(damaged):,} of {len(files):,} files: {which}.", *table.notes))
