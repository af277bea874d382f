"""A trace run against policies offline: what each would have cost, and from which evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from zerotune.agent.nccl import fabric as fabrics
from zerotune.store.errors import UserError
from zerotune.store.records import CandidateStatistics, Collective, PlanRow
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.features import CostPrior
from zerotune.tuner.offline.replay.engine import PolicyTotal, ShapeVerdict, judge
from zerotune.tuner.offline.replay.estimates import CostEstimates
from zerotune.tuner.offline.replay.fabric_evidence import FabricEvidence, evidence_of
from zerotune.tuner.offline.replay.legality import is_known_to_sum, without_refused
from zerotune.tuner.offline.replay.loading import load_table
from zerotune.tuner.offline.replay.notes import what_is_missing, what_was_judged, where_it_does_not_fit
from zerotune.tuner.offline.replay.nothing_judged import nothing_judged
from zerotune.tuner.offline.replay.oracle_facts import ORACLE, OracleFacts, oracle_facts
from zerotune.tuner.offline.replay.plans import plan_rows
from zerotune.tuner.offline.replay.policies import DEFAULT_POLICIES, POLICIES, PolicyContext, has_others, named
from zerotune.tuner.offline.replay.render import render
from zerotune.tuner.offline.replay.result import ReplayResult
from zerotune.tuner.offline.replay.stores import UNKNOWN, named_store, why_unknown
from zerotune.tuner.offline.replay.table import Array, CollectiveTable, Shape
from zerotune.tuner.offline.replay.timeline.schedule import StepModel
from zerotune.tuner.offline.replay.timeline.steps import (
    StepEstimate,
    StepFacts,
    StepRefusal,
    step_estimates,
    step_facts,
)
from zerotune.tuner.offline.replay.whatif.whatif import JobChange, Logged, WhatIf, model_predictor, what_if
from zerotune.tuner.traces import read_trace

__all__ = [
    "DEFAULT_POLICIES",
    "POLICIES",
    "CollectiveTable",
    "JobChange",
    "PolicyTotal",
    "ReplayResult",
    "ShapeVerdict",
    "WhatIf",
    "load_table",
    "named_store",
    "render",
    "replay",
    "replay_table",
]


def replay(
    trace: Path,
    policies: Sequence[str],
    store_path: Path | None = None,
    fabric: str | None = None,
    plan: Path | None = None,
    change: JobChange | None = None,
    format_name: str | None = None,
    collective: Collective | None = None,
    job_id: str | None = None,
) -> ReplayResult:
    """Judge policies on a trace.

    Args:
        trace: a trace file, or a folder such as `launch --log-trace` writes.
        policies: names in POLICIES.
        store_path: store with measurements of other jobs; None, or no file: nothing is known of them.
        fabric: name or path of the fabric file for predictions, where the trace does not name its fabric.
        plan: file that the policy `table` follows: our plan file, or a table of NVIDIA's, RCCL's, NCCLX's or scitix's.
        change: what the step would be in another job; None: not asked.
        format_name: read the trace as this format; None: found out.
        collective: what was run, where the trace does not say it.
        job_id: whose files are judged, in a folder with several jobs.

    Returns:
        What each policy would have cost, and from which evidence.

    Raises:
        TraceError: the trace cannot be read, or nothing in it can be judged.
        UserError: a policy, the fabric, the plan, the store, the job or the change is not usable.
    """
    named(policies)
    table = load_table(trace, fabric, format_name=format_name, collective=collective, job_id=job_id)
    communicators = list(dict.fromkeys(shape.communicator for shape in table.shapes()[0]))
    rows = None if plan is None else plan_rows(plan, communicators)
    others = evidence_of(store_path, table.fabric_id, without_job=table.job_id)
    elsewhere = None if change is None else change.fabric
    result = replay_table(
        table,
        policies,
        statistics=others.statistics,
        knowledge=others.knowledge,
        model_error=others.model_error,
        plan=rows,
        trace=str(trace),
        change=change,
        evidence=None if elsewhere is None else evidence_of(store_path, elsewhere.fabric_id, without_job=table.job_id),
        unknown=why_unknown(store_path, trace) if table.fabric_id else "The trace does not name its fabric",
    )
    if not any(total.n_judged for total in result.totals) and result.steps is None and result.what_if is None:
        settings = {verdict.setting for verdict in result.verdicts if verdict.baseline_us is not None}
        raise nothing_judged(read_trace(trace, format_name), table, settings)
    return result


def replay_table(
    table: CollectiveTable,
    policies: Sequence[str],
    *,
    statistics: Sequence[CandidateStatistics] = (),
    knowledge: Knowledge | None = None,
    model_error: float = 0.0,
    plan: Sequence[PlanRow] | None = None,
    trace: str = "",
    change: JobChange | None = None,
    evidence: FabricEvidence | None = None,
    unknown: str = UNKNOWN,
) -> ReplayResult:
    """Judge policies on a table of collectives.

    Args:
        table: the job's collectives.
        policies: names in POLICIES.
        statistics: what other jobs measured on the trace's fabric.
        knowledge: what was learned from these jobs; None: nothing.
        model_error: of the learned model, see `FabricEvidence`.
        plan: rows that the policy `table` follows; None: what earlier jobs showed.
        trace: name of the trace, for the result.
        change: what the step would be in another job; None: not asked.
        evidence: of the fabric that `change` names; None: it is the trace's own.
        unknown: why there are no `statistics`, as the beginning of a sentence.

    Returns:
        What each policy would have cost, and from which evidence.

    Raises:
        UserError: a policy is unknown, or `change` cannot be judged from this trace.
    """
    own_evidence = FabricEvidence(statistics, knowledge or Knowledge(), model_error)
    knowledge = own_evidence.knowledge
    costs = CostPrior(table.fabric) if _fabric(table) is not None else None
    shapes, shape_index = table.shapes()
    fabric = _fabric(table)
    if costs is not None and fabric is not None and not is_known_to_sum(table):
        without_refused(costs, fabric, shapes)
    predictor = None if costs is None or fabric is None else model_predictor(own_evidence, costs, fabric)
    estimates = CostEstimates(table, shapes, shape_index, statistics, predictor)
    counts = np.bincount(shape_index, minlength=len(shapes)).tolist() if shapes else []
    facts, model = step_facts(table, None if fabric is None else fabric.sms_slowdown)
    n_steps = len(table.steps) or len(np.unique(table.rows["step"]))
    context = PolicyContext(
        estimates,
        knowledge,
        costs,
        plan,
        counts=dict(zip(shapes, counts, strict=True)),
        n_steps=n_steps,
        step_us=None if facts is None else facts.step_us,
        facts=table.fabric,
        fabric=fabric,
    )
    duration_us = np.nan_to_num(table.duration_us.astype(np.float64))
    logged_us = np.bincount(shape_index, weights=duration_us, minlength=len(shapes)) if shapes else np.empty(0)
    totals, verdicts = judge(shapes, counts, logged_us.tolist(), named(policies), context)
    total_us = float(logged_us.sum())
    channels = {} if model is None else _default_channels(model, table, shapes, shape_index)
    step_estimates, refusals = _steps(facts, model, channels, shapes, totals, verdicts, total_us)
    answer = None
    if change is not None and not change.is_none:
        if facts is None or model is None:
            reason = "it tells nothing of its steps" if facts is None else facts.reason
            raise UserError(f"a changed job cannot be judged from this trace: {reason}", "log one with --log-trace")
        logged = Logged(facts, model, channels, fabric, table.fabric_id)
        answer = what_if(change, logged, named(policies), context, evidence or own_evidence, plan)
    return ReplayResult(
        trace=trace,
        job_id=table.job_id,
        fabric_id=table.fabric_id,
        emulated=str(table.fabric.get("emulated", "")) if table.is_emulated else "",
        n_files=table.n_files,
        n_collectives=len(table.rows),
        n_timed=int(np.count_nonzero(np.isfinite(table.duration_us))),
        n_steps=n_steps,
        n_dropped=table.n_dropped,
        dropped_percent=100 * table.n_dropped / max(1, table.n_dropped + table.n_logged),
        n_left_out=table.n_left_out,
        left_out_percent=table.left_out_percent,
        logged_us=total_us,
        totals=totals,
        verdicts=verdicts,
        steps=facts,
        step_estimates=tuple(step_estimates),
        step_refusals=tuple(refusals),
        what_if=answer,
        oracle=_oracle(context, shapes, totals, verdicts),
        notes=(
            *what_was_judged(table, estimates, shapes, counts),
            *where_it_does_not_fit(fabric, shapes, counts),
            *what_is_missing(table, statistics, costs, unknown),
        ),
    )


def _steps(
    facts: StepFacts | None,
    model: StepModel | None,
    channels: Mapping[Shape, int],
    shapes: Sequence[Shape],
    totals: Sequence[PolicyTotal],
    verdicts: Sequence[ShapeVerdict],
    total_us: float,
) -> tuple[Sequence[StepEstimate], Sequence[StepRefusal]]:
    if facts is None or not totals:
        return (), ()
    by_policy = {
        name: dict(zip(shapes, theirs, strict=True)) for name, theirs in _by_policy(shapes, totals, verdicts).items()
    }
    return step_estimates(facts, model, totals, by_policy, channels, total_us)


def _oracle(
    context: PolicyContext, shapes: Sequence[Shape], totals: Sequence[PolicyTotal], verdicts: Sequence[ShapeVerdict]
) -> OracleFacts | None:
    by_policy = _by_policy(shapes, totals, verdicts)
    others = [has_others(context, shape) for shape in shapes] if ORACLE in by_policy else []
    return oracle_facts(by_policy, others)


def _by_policy(
    shapes: Sequence[Shape], totals: Sequence[PolicyTotal], verdicts: Sequence[ShapeVerdict]
) -> dict[str, Sequence[ShapeVerdict]]:
    n_shapes = len(shapes)
    return {total.policy: verdicts[at * n_shapes : (at + 1) * n_shapes] for at, total in enumerate(totals)}


def _default_channels(
    model: StepModel, table: CollectiveTable, shapes: Sequence[Shape], shape_index: Array
) -> dict[Shape, int]:
    """On how many channels NCCL's own choice ran, by shape."""
    numbers = {shape: at for at, shape in enumerate(shapes)}
    timed = np.isfinite(table.duration_us)
    found = {}
    for shape in {call.shape for call in model.program.calls}:
        mine = timed & (shape_index == numbers[shape])
        own = mine & table.is_default
        found[shape] = int(np.median(table.rows["n_channels"][own if own.any() else mine]))
    return found


def _fabric(table: CollectiveTable) -> fabrics.Fabric | None:
    name = table.fabric.get("emulated")
    return fabrics.load(name) if isinstance(name, str) and name else None
