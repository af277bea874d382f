"""A trace run against policies offline: what each would have cost, and from which evidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agent.nccl import fabric as fabrics
from store.database import Store
from store.records import BASELINE, Candidate, CandidateStatistics
from tuner.features import CostPrior
from tuner.knowledge import Knowledge
from tuner.replay.engine import PolicyTotal, ReplayResult, ShapeVerdict, judge
from tuner.replay.evidence import Evidence, Prediction, Predictor
from tuner.replay.loading import load_table
from tuner.replay.policies import POLICIES, Context, named
from tuner.replay.render import render
from tuner.replay.table import CollectiveTable, Shape

__all__ = [
    "POLICIES",
    "CollectiveTable",
    "PolicyTotal",
    "ReplayResult",
    "ShapeVerdict",
    "load_table",
    "render",
    "replay",
    "replay_table",
]


def replay(
    trace: Path,
    policies: Sequence[str],
    store_path: Path | None = None,
    fabric: str | None = None,
) -> ReplayResult:
    """Judge `policies` on the trace at `trace` (a file, or a folder of --log-trace).

    Earlier measurements come from the store at `store_path` if it exists; `fabric` names the fabric for
    predictions when the trace does not say which it ran on.

    Raises:
        TraceError: the trace cannot be read.
        UserError: a policy, the fabric or the store is not usable.
    """
    named(policies)
    table = load_table(trace, fabric)
    statistics: Sequence[CandidateStatistics] = ()
    knowledge = Knowledge.empty()
    if store_path is not None and store_path.exists() and table.fabric_id:
        with Store.open(store_path, read_only=True) as store:
            statistics = store.statistics(table.fabric_id)
            knowledge = Knowledge.from_store(store, table.fabric_id)
    return replay_table(table, policies, statistics=statistics, knowledge=knowledge, trace=str(trace))


def replay_table(
    table: CollectiveTable,
    policies: Sequence[str],
    *,
    statistics: Sequence[CandidateStatistics] = (),
    knowledge: Knowledge | None = None,
    trace: str = "",
) -> ReplayResult:
    """Judge `policies` on a table of collectives; `statistics` and `knowledge` are of earlier runs."""
    knowledge = knowledge or Knowledge.empty()
    costs = _costs(table)
    shapes, shape_index = table.shapes()
    predictor = None if costs is None else _predictor(knowledge, costs)
    evidence = Evidence(table, shapes, shape_index, statistics, predictor)
    context = Context(evidence, statistics, knowledge, costs)
    counts = np.bincount(shape_index, minlength=len(shapes)).tolist() if shapes else []
    duration_us = np.nan_to_num(table.rows["duration_us"].astype(np.float64))
    logged_us = np.bincount(shape_index, weights=duration_us, minlength=len(shapes)) if shapes else np.empty(0)
    totals, verdicts = judge(shapes, counts, logged_us.tolist(), named(policies), context)
    return ReplayResult(
        trace=trace,
        job_id=table.job_id,
        fabric_id=table.fabric_id,
        emulated=str(table.fabric.get("emulated", "")) if table.is_emulated else "",
        n_files=table.n_files,
        n_collectives=len(table.rows),
        n_timed=int(np.count_nonzero(np.isfinite(table.rows["duration_us"]))),
        n_steps=len(table.steps) or len(np.unique(table.rows["step"])),
        n_dropped=table.n_dropped,
        logged_us=float(logged_us.sum()),
        totals=totals,
        verdicts=verdicts,
        notes=_notes(table, statistics, costs),
    )


def _costs(table: CollectiveTable) -> CostPrior | None:
    """NCCL's cost on the trace's fabric; None when nothing describes it, for then nothing is predicted."""
    name = table.fabric.get("emulated")
    if not isinstance(name, str) or not name:
        return None
    fabrics.load(name)
    return CostPrior(table.fabric)


def _predictor(knowledge: Knowledge, costs: CostPrior) -> Predictor:
    def predict(shape: Shape, candidate: Candidate) -> Prediction | None:
        candidates = (candidate,) if candidate == BASELINE else (candidate, BASELINE)
        prior = knowledge.prior(shape.key, shape.message_bytes, candidates, costs)
        mean, std = float(prior.mean[0]), float(prior.std[0])
        return (float(np.exp(mean)), std) if np.isfinite(mean) else None

    return predict


def _notes(
    table: CollectiveTable, statistics: Sequence[CandidateStatistics], costs: CostPrior | None
) -> tuple[str, ...]:
    notes = []
    if not np.isfinite(table.rows["duration_us"]).any():
        notes.append("The trace has no durations: nothing is measured here.")
    if not statistics:
        notes.append("The store has no measurements of this fabric: nothing is measured elsewhere.")
    if costs is None:
        notes.append("The fabric is not described: nothing is predicted. Name one with --fabric.")
    return tuple(notes)
