"""What is said of a trace in which replay finds nothing to judge."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from zerotune.store.counted import counted
from zerotune.store.errors import TraceError
from zerotune.tuner.offline.replay.table import CollectiveTable
from zerotune.tuner.traces import Trace

_MOST_NAMED: Final = 3


def nothing_judged(trace: Trace, table: CollectiveTable, settings: Collection[str]) -> TraceError:
    """What was found in a trace, and what was wanted.

    Args:
        trace: the file or files.
        table: what they hold; nothing of it has a cost under the policies, measured or predicted.
        settings: what the policies would run where NCCL's own choice has a cost; empty: it has none anywhere.

    Returns:
        The error to raise.
    """
    where = trace.paths[0] if len(trace.paths) == 1 else trace.paths[0].parent
    fault = "".join(f" ({note.removesuffix('.')})" for note in table.notes[:1])  # a file that was cut comes first
    begin = f"{where} was read as {trace.title}"
    if not len(table.rows):
        reasons = [f"{reason.value} ({count:,})" for reason, count in list(table.left_out.items())[:3]]
        if table.n_partial:
            reasons.append(f"not logged by all ranks ({table.n_partial:,})")
        why = (": " + "; ".join(reasons) if reasons else "") + fault
        remedy = "docs/reference/traces.md says what each format must hold"
        return TraceError(f"{begin}: it has no {trace.record} to judge{why}", remedy)
    lacks = "a time of NCCL's own choice" if np.isfinite(table.duration_us).any() else "a time"
    if settings:
        more = ", ..." if len(settings) > _MOST_NAMED else ""
        lacks = f"a time of what a policy would run ({', '.join(sorted(settings)[:_MOST_NAMED])}{more})"
    whole = f"{begin}: none of its {counted(len(table.rows), 'collective')} has {lacks}{fault}"
    if table.fabric.get("emulated"):
        return TraceError(f"{whole}, and its fabric predicts none", "replay a trace with times, or give --store")
    remedy = "name it with --fabric (`zerotune fabrics` lists them)"
    return TraceError(f"{whole}, and no fabric is described that predicts one", remedy)
