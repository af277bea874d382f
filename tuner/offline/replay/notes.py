"""Notes of a replay beside its figures: what it judged, and for what it has no evidence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerotune.agent.nccl.fabric import Fabric
from zerotune.store.records import BASELINE, CandidateStatistics
from zerotune.tuner.modeling.features import CostPrior
from zerotune.tuner.offline.replay.estimates import CostEstimates
from zerotune.tuner.offline.replay.legality import fits
from zerotune.tuner.offline.replay.table import CollectiveTable, Shape


def what_was_judged(
    table: CollectiveTable, estimates: CostEstimates, shapes: Sequence[Shape], counts: Sequence[int]
) -> tuple[str, ...]:
    """Note on what became of a foreign trace's records.

    Args:
        table: the trace.
        estimates: what is known of costs.
        shapes: of the trace, shape (n_shapes,).
        counts: collectives of each shape, shape (n_shapes,).

    Returns:
        One sentence; none for our own traces, whose losses are counted elsewhere.
    """
    if not table.n_records and not table.left_out:
        return ()
    n_collectives = len(table.rows)
    n_priced = sum(count for shape, count in zip(shapes, counts, strict=True) if estimates.estimate(shape, BASELINE))
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
    return ("; ".join(parts) + ".",)


def where_it_does_not_fit(fabric: Fabric | None, shapes: Sequence[Shape], counts: Sequence[int]) -> tuple[str, ...]:
    """Note on collectives for which a described fabric predicts nothing.

    Args:
        fabric: None: nobody described it.
        shapes: of the trace, shape (n_shapes,).
        counts: collectives of each shape, shape (n_shapes,).

    Returns:
        One sentence, or none.

    Raises:
        FabricError: none of the communicators with known ranks fits on the fabric.
    """
    if fabric is None:
        return ()
    misfits = {shape: n for shape, n in zip(shapes, counts, strict=True) if not fits(fabric, shape.communicator)}
    placed = [shape.communicator for shape in shapes if shape.n_ranks]
    if placed and not any(fits(fabric, communicator) for communicator in placed):
        fabric.topology(placed[0])
    if not misfits:
        return ()
    places = sorted({shape.communicator for shape in misfits}, key=lambda one: (one.n_ranks, one.n_nodes))
    named = ", ".join(str(one) if one.n_ranks else "an unknown number of ranks" for one in places[:3])
    n_misfits = sum(misfits.values())
    more = " ..." if len(places) > 3 else ""
    return (f"{n_misfits:,} collectives are of {named}{more}: fabric {fabric.name} predicts nothing there.",)


def what_is_missing(
    table: CollectiveTable, statistics: Sequence[CandidateStatistics], costs: CostPrior | None, unknown: str
) -> tuple[str, ...]:
    """The trace reader's notes, and which evidence is missing.

    Args:
        table: the trace.
        statistics: what other jobs measured.
        costs: NCCL's cost model; None: nobody described the fabric.
        unknown: why there are no `statistics`, as the beginning of a sentence.

    Returns:
        One sentence per note.
    """
    notes = list(table.notes)
    if not len(table.rows):
        notes.append("There is no collective in it that could be judged.")
        return tuple(notes)
    if table.is_silent_on_choices and np.isfinite(table.duration_us).any():
        notes.append("The trace does not say who chose its settings: what ran counts as NCCL's own choice.")
    if not np.isfinite(table.duration_us).any():
        notes.append("The trace has no durations: nothing is measured here.")
    if not statistics:
        notes.append(
            f"{unknown}: nothing is measured elsewhere, and nothing is learned. Policies that know earlier jobs alone"
            " (model, nearest, and table without --plan) leave all to NCCL."
        )
    if costs is None:
        notes.append("The fabric is not described: nothing is predicted. Name one with --fabric.")
    return tuple(notes)
