"""A trace of any format as replay's table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agent.nccl import fabric as fabrics
from tuner.replay.table import CollectiveTable, from_own
from tuner.traces.own import read_own, trace_files


def load_table(path: Path, fabric: str | None = None) -> CollectiveTable:
    """The collectives of the trace at `path`; `fabric` describes the machine where the trace does not.

    Raises:
        TraceError: it is no trace, or a broken one.
        FabricError: there is no such fabric.
    """
    table = from_own([read_own(file) for file in trace_files(path)])
    if fabric is None or table.fabric:
        return table
    described = fabrics.load(fabric)
    return replace(table, fabric_id=described.fabric_id, fabric=described.describe())
