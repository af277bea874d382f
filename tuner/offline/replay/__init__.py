"""Judges policies on a trace offline: what each would have cost, and from which evidence.

A trace is read as a table of collectives (table.py). The table gives its steps' program (schedule.py) and, with the
store's measurements (evidence.py), the cost of each setting (estimates.py). Policies name settings (policies.py),
judging.py sums up their costs, steps.py runs the program with them, and whatif.py does the same for another job.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ....store.errors import UserError
from ....store.records import Collective, PlanRow
from ...modeling.cost_prior import CostPrior
from .estimates import CostEstimates
from .evidence import FabricEvidence, evidence_of, named_store
from .judging import judge, oracle_facts
from .legality import without_refused
from .notes import notes_of, nothing_judged
from .plans import plan_rows
from .policies import DEFAULT_POLICIES, POLICIES, PolicyContext, named
from .reading import load_table, read_table
from .render import render
from .result import ReplayResult
from .steps import LoggedSteps, logged_steps, step_estimates
from .table import CollectiveTable
from .whatif import JobChange, what_if

__all__ = [
    "DEFAULT_POLICIES",
    "POLICIES",
    "CollectiveTable",
    "FabricEvidence",
    "JobChange",
    "ReplayResult",
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
    """The cost that each policy would have had on a trace, and its evidence.

    Args:
        policies: names in POLICIES.
        store_path: measurements of other jobs; None, or no file: nothing is known of them.
        fabric: name or path of the fabric file for predictions, if the trace does not name its fabric.
        plan: file that the policy `table` follows: our plan file, or a table of NVIDIA's, RCCL's, NCCLX's or scitix's.
        collective: the collective that ran, if the trace does not name it.
        job_id: the job to judge, in a folder with several jobs.

    Raises:
        UserError: a policy, the fabric, the plan, the store, the job or the change is not usable.
    """
    named(policies)
    source, table = read_table(trace, fabric, format_name=format_name, collective=collective, job_id=job_id)
    communicators = list(dict.fromkeys(shape.communicator for shape in table.shapes[0]))
    rows = None if plan is None else plan_rows(plan, communicators)
    evidence = evidence_of(store_path, table.fabric_id, trace, without_job=table.job_id)
    elsewhere = evidence
    if change is not None and change.fabric is not None:
        elsewhere = evidence_of(store_path, change.fabric.fabric_id, trace, without_job=table.job_id)
    result = replay_table(table, policies, evidence, plan=rows, trace=str(trace), change=change, elsewhere=elsewhere)
    if not any(total.n_judged for total in result.totals) and result.steps is None and result.what_if is None:
        settings = {verdict.setting for verdict in result.verdicts if verdict.baseline_us is not None}
        raise nothing_judged(source, table, settings)
    return result


def replay_table(
    table: CollectiveTable,
    policies: Sequence[str],
    evidence: FabricEvidence | None = None,
    *,
    plan: Sequence[PlanRow] | None = None,
    trace: str = "",
    change: JobChange | None = None,
    elsewhere: FabricEvidence | None = None,
) -> ReplayResult:
    """The cost that each policy would have had on a table of collectives, and its evidence.

    Args:
        evidence: of other jobs on the trace's fabric.
        plan: what the policy `table` follows; None: the winners of earlier jobs.
        change: another job whose step is predicted, too.
        elsewhere: evidence on the fabric that `change` names; None: it is the trace's own.

    Raises:
        UserError: a policy is unknown, or `change` cannot be judged from this trace.
    """
    evidence, asked = evidence or FabricEvidence(), named(policies)
    steps = logged_steps(table)
    context = _context(table, evidence, plan, steps)
    index = table.shapes[1]
    duration_us = np.nan_to_num(table.duration_us.astype(np.float64))
    logged_us = np.bincount(index, weights=duration_us, minlength=len(context.counts)).tolist()
    judged = judge(context.counts, logged_us, asked, context)
    estimates, refusals = step_estimates(steps, judged, sum(logged_us))
    answer = None
    if change is not None and change != JobChange():
        if steps is None or steps.model is None:
            reason = "it tells nothing of its steps" if steps is None else steps.facts.reason
            raise UserError(f"a changed job cannot be judged from this trace: {reason}", "log one with --log-trace")
        answer = what_if(change, steps, asked, context, elsewhere or evidence)
    return ReplayResult(
        trace=trace,
        job_id=table.job_id,
        fabric_id=table.fabric_id,
        emulated=str(table.fabric.get("emulated", "")) if table.is_emulated else "",
        n_files=table.n_files,
        n_collectives=len(table.rows),
        n_timed=int(np.count_nonzero(np.isfinite(table.duration_us))),
        n_steps=context.n_steps,
        n_dropped=table.n_dropped,
        dropped_percent=100 * table.n_dropped / max(1, table.n_dropped + table.n_logged),
        n_left_out=table.n_left_out,
        left_out_percent=table.left_out_percent,
        logged_us=sum(logged_us),
        totals=tuple(one.total for one in judged),
        verdicts=tuple(verdict for one in judged for verdict in one.by_shape.values()),
        steps=None if steps is None else steps.facts,
        step_estimates=tuple(estimates),
        step_refusals=tuple(refusals),
        what_if=answer,
        oracle=oracle_facts(judged, context),
        notes=tuple(notes_of(table, context, evidence)),
    )


def _context(
    table: CollectiveTable, evidence: FabricEvidence, plan: Sequence[PlanRow] | None, steps: LoggedSteps | None
) -> PolicyContext:
    """The data that policies may use: the table's values, and costs."""
    shapes, index = table.shapes
    estimates = CostEstimates(table, evidence.statistics)
    costs = None
    if table.machine is not None:
        costs = CostPrior(table.fabric)
        if not estimates.sums:
            without_refused(costs, table.machine, shapes)
        estimates = estimates.with_predictor(evidence.predictor(costs, table.machine))
    return PolicyContext(
        estimates,
        evidence.knowledge,
        costs,
        plan,
        counts=dict(zip(shapes, np.bincount(index, minlength=len(shapes)).tolist(), strict=True)),
        n_steps=len(table.steps) or len(np.unique(table.rows["step"])),
        step_us=None if steps is None else steps.facts.step_us,
        facts=table.fabric,
        fabric=table.machine,
    )
