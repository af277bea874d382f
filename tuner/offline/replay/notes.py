"""Replay's notes: what it judged, which evidence is missing, and why it judges nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

import numpy as np

from ....agent.nccl.fabric_model import Fabric
from ....store.counted import counted
from ....store.errors import TraceError
from ....store.records import BASELINE
from ...traces import Trace
from .evidence import FabricEvidence
from .legality import fits
from .policies import PolicyContext
from .table import CollectiveTable, Shape

_MOST_NAMED: Final = 3


def notes_of(table: CollectiveTable, context: PolicyContext, evidence: FabricEvidence) -> Iterator[str]:
    """Notes on a foreign trace's records, on communicators that do not fit, by the reader, and on missing evidence.

    Raises:
        FabricError: no communicator with known ranks fits on the described fabric.
    """
    if table.n_records or table.left_out:
        yield _what_was_judged(table, context)
    if context.fabric is not None:
        yield from _where_it_does_not_fit(context.fabric, context.counts)
    yield from table.notes
    if not len(table.rows):
        yield "There is no collective in it that could be judged."
        return
    is_timed = bool(np.isfinite(table.duration_us).any())
    if table.is_silent_on_choices and is_timed:
        yield "The trace does not say who chose its settings: what ran counts as NCCL's own choice."
    if not is_timed:
        yield "The trace has no durations: nothing is measured here."
    if not evidence.statistics:
        yield (
            f"{evidence.why_none}: nothing is measured elsewhere, and nothing is learned. Policies that only know"
            " earlier jobs (model, nearest, and table without --plan) would leave all to NCCL."
        )
    if context.costs is None:
        yield "The fabric is not described: nothing is predicted. Name one with --fabric."


def _what_was_judged(table: CollectiveTable, context: PolicyContext) -> str:
    n_collectives = len(table.rows)
    n_priced = sum(count for shape, count in context.counts.items() if context.estimates.estimate(shape, BASELINE))
    parts = [f"Records: {table.n_records + sum(table.left_out.values()):,}"]
    if table.left_out:
        reasons = (f"{count:,} ({reason.value})" for reason, count in table.left_out.items())
        parts.append("left out: " + ", ".join(reasons))
    if n_collectives < table.n_records:
        parts.append(f"joined over ranks: {table.n_records:,} to {n_collectives:,}")
    parts.append(f"judged: {n_priced:,}")
    if n_priced < n_collectives:
        why = "no time of NCCL's own choice for that collective, ranks and bytes"
        parts.append(f"not judged: {n_collectives - n_priced:,} ({why})")
    return "; ".join(parts) + "."


def _where_it_does_not_fit(fabric: Fabric, counts: Mapping[Shape, int]) -> Iterator[str]:
    placed = [shape.communicator for shape in counts if shape.n_ranks]
    if placed and not any(fits(fabric, communicator) for communicator in placed):
        fabric.topology(placed[0])
    misfits = {shape: count for shape, count in counts.items() if not fits(fabric, shape.communicator)}
    if misfits:
        places = sorted({shape.communicator for shape in misfits}, key=lambda one: (one.n_ranks, one.n_nodes))
        named = ", ".join(str(one) if one.n_ranks else "an unknown number of ranks" for one in places[:_MOST_NAMED])
        more = " ..." if len(places) > _MOST_NAMED else ""
        n_misfits = sum(misfits.values())
        yield f"{n_misfits:,} collectives are of {named}{more}: fabric {fabric.name} predicts nothing there."


def nothing_judged(trace: Trace, table: CollectiveTable, settings: Collection[str]) -> TraceError:
    """The error for a trace without any cost: what was found, and what is missing.

    `settings` are the policies' settings for calls whose baseline has a cost; empty: no baseline has one.
    """
    where = trace.paths[0] if len(trace.paths) == 1 else trace.paths[0].parent
    fault = "".join(f" ({note.removesuffix('.')})" for note in table.notes[:1])  # truncated files come first
    begin = f"{where} was read as {trace.title}"
    if not len(table.rows):
        reasons = [f"{reason.value} ({count:,})" for reason, count in list(table.left_out.items())[:_MOST_NAMED]]
        if table.n_partial:
            reasons.append(f"not logged by all ranks ({table.n_partial:,})")
        why = (": " + "; ".join(reasons) if reasons else "") + fault
        remedy = "docs/reference/formats.md says what each format must hold"
        return TraceError(f"{begin}: it has no {trace.record} to judge{why}", remedy)
    lacks = "a time of NCCL's own choice" if np.isfinite(table.duration_us).any() else "a time"
    if settings:
        more = ", ..." if len(settings) > _MOST_NAMED else ""
        lacks = f"a time of what a policy would run ({', '.join(sorted(settings)[:_MOST_NAMED])}{more})"
    whole = f"{begin}: none of its {counted(len(table.rows), 'collective')} has {lacks}{fault}"
    if table.fabric.get("emulated"):
        return TraceError(f"{whole}, and its fabric predicts none", "replay a trace with times, or give --store")
    remedy = "name it with --fabric (`zerotune hardware` lists them)"
    return TraceError(f"{whole}, and no fabric is described that predicts one", remedy)
