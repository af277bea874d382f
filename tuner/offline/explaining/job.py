"""A job's decisions, explained key by key."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from ....agent.nccl.catalog import parse_collective
from ....store.errors import UserError
from ....store.misaligned import misaligned
from ....store.records import (
    BASELINE,
    CandidateStatistics,
    Decision,
    DecisionKey,
    DecisionKind,
    JobRecord,
    MissingEvidence,
    Phase,
    Stage,
    StepRecord,
    size_class,
    size_class_range,
)
from ....store.sqlite.database import Store
from ....store.sqlite.reading.measured_calls import MeasuredCalls
from ...client.beside import baseline
from ...decided import decisions_that_ran, settled_decisions, since_takeover
from ...fingerprint.missing import missing_after, missing_of_keys
from ...modeling.medians import Medians, medians
from ...modeling.statistics import statistics
from ..comparison import compare
from ..jobs.before_after import JobsRead, of_job
from ..jobs.finding import job_of
from ..jobs.listing import gain_of
from .keys import Guesses, by_keys, explained, news_of
from .values import Explanation, Head


def explain(
    store_path: Path, job_id: str | None, collective: str | None, phase: str | None, message_bytes: int | None
) -> list[Explanation]:
    """Explanations of one job's keys; those that take most of a step come first. None selects all.

    Args:
        job_id: id or name of the job; None: the newest that trained.
        message_bytes: total size; selects its size class.

    Raises:
        UserError: there is no such job, collective or phase, or the size is below 1.
    """
    wanted_collective = None if collective is None else parse_collective(collective)
    if phase is not None and phase not in Phase.__members__:
        raise UserError(f"unknown phase {phase!r}", f"use one of {', '.join(Phase.__members__)}")
    if message_bytes is not None and message_bytes < 1:
        raise UserError(f"--message-bytes {message_bytes} is not positive", "give the total size in bytes")

    def is_wanted(key: DecisionKey) -> bool:
        return (
            wanted_collective in (None, key.collective)
            and phase in (None, key.phase.name)
            and (message_bytes is None or key.size_class == size_class(message_bytes))
        )

    with Store.open(store_path, read_only=True) as store:
        return explain_in(store, job_of(store, job_id), is_wanted)


def explain_in(
    store: Store, job: JobRecord, is_wanted: Callable[[DecisionKey], bool] = lambda _: True, *, guesses: bool = True
) -> list[Explanation]:
    """Explanations of a job's keys; those that take most of a step come first.

    `guesses` adds expectations at keys without decisions.
    """
    decisions = store.decisions(job_id=job.job_id)
    fabrics = dict.fromkeys([job.fabric_id, *(decision.fabric_id for decision in decisions)])
    lines = [line for fabric_id in fabrics for line in statistics(store, fabric_id)]
    here = medians([line for fabric_id in fabrics for line in statistics(store, fabric_id, job.job_id)])
    by_key = by_keys([decision for decision in decisions if is_wanted(decision.key)])
    undecided = [key for key in here if key not in by_key and is_wanted(key)]
    if not decisions and not store.steps(job.job_id):
        undecided = []  # a sweep or an import, which did not train
    expected: dict[DecisionKey, Guesses] = {key: ("", []) for key in undecided}
    if undecided and guesses:
        expected = _guesses(store, job.fabric_id, undecided, here, lines)
    jobs = JobsRead(store)
    head = _head(store, jobs, job, decisions, here)
    highest_epoch = store.highest_epoch(job.job_id)
    calls, steps = store.measured_calls(job.job_id), store.steps(job.job_id)
    changes = of_job(jobs, job).changes
    current, everywhere = set(since_takeover(decisions)), medians(lines)
    found = explained(by_key, here, everywhere, expected, news_of(decisions), current, highest_epoch)
    ran = decisions_that_ran(decisions, highest_epoch)
    in_force = settled_decisions(one for one in ran if one in current)
    step_us = median(step.duration_us for step in steps) if steps else 0.0
    own = [step.duration_us for step in steps if step.epoch == 0]  # before the first plan
    own_us = changes[0].before_us if changes else median(own) if own else step_us
    shared = [_with_share(one, in_force.get(one.key), here, everywhere, calls, step_us, own_us) for one in found]
    in_order = sorted(shared, key=lambda one: -(one.step_percent or 0.0))
    return [msgspec.structs.replace(one, job=head) for one in in_order]


def _with_share(
    one: Explanation,
    in_force: Decision | None,
    here: Medians,
    everywhere: Medians,
    calls: MeasuredCalls,
    step_us: float,
    own_step_us: float,
) -> Explanation:
    """Add the share of a step that the key's calls take, and the saving against NCCL's own choice."""
    one = msgspec.structs.replace(one, is_quiet=one.setting == str(BASELINE))
    known = here.get(one.key, {})
    if not (known and calls.n_steps and step_us):
        return one
    own = known.get(BASELINE)
    own_us = us = None if own is None else own.median_us
    if in_force is not None and not in_force.candidate.is_baseline:
        compared = compare(in_force, here, everywhere)
        own_us, us = (compared.own_us, compared.us) if compared.is_measured else (None, None)
    n_calls = calls.of_keys[one.key] / calls.n_steps
    saved_us = None if own_us is None or us is None else n_calls * (own_us - us)
    return msgspec.structs.replace(
        one,
        calls_per_step=n_calls,
        step_percent=None if us is None else 100 * n_calls * us / step_us,
        saved_us=saved_us,
        saved_percent=None if saved_us is None else 100 * saved_us / own_step_us,
    )


def head_of(store_path: Path, job_id: str | None) -> Head:
    """The job that `explain` explains."""
    with Store.open(store_path, read_only=True) as store:
        job = job_of(store, job_id)
        here = medians(statistics(store, job.fabric_id, job.job_id))
        return _head(store, JobsRead(store), job, store.decisions(job_id=job.job_id), here)


def _head(store: Store, jobs: JobsRead, job: JobRecord, decisions: Sequence[Decision], here: Medians) -> Head:
    current = since_takeover(decisions)
    keys = [*here, *(decision.key for decision in decisions if not decision.is_of_job)]
    emulated = str(store.fabrics().get(job.fabric_id, {}).get("emulated", ""))
    return Head(
        job_id=job.job_id,
        fabric_id=job.fabric_id,
        emulated=emulated,
        n_ranks=job.n_ranks,
        communicators=sorted({key.communicator for key in keys}),
        name=job.name,
        baseline=baseline(job.passages),
        stage=job.stage.name,
        missing_evidence=why_unknown(job, here, jobs.steps(job.job_id)),
        lateness=job.lateness,
        misaligned=misaligned(store.ran(job.job_id)),
        gain=gain_of(jobs, job),
        n_damaged=store.measured_calls(job.job_id).n_damaged,
        n_impossible_times=job.passages.n_impossible_times,
        frozen_since=max((one.step or 0 for one in current if one.kind == DecisionKind.freeze), default=0),
        in_shadow=next((one.reason for one in reversed(current) if one.kind == DecisionKind.shadow), ""),
    )


def why_unknown(job: JobRecord, here: Medians, steps: Sequence[StepRecord]) -> MissingEvidence:
    """Why a job's measured collectives do not show what kind of training it is; `nothing` if they do show it.

    `steps` must be in order.
    """
    if job.stage is not Stage.unknown:
        return MissingEvidence.nothing
    missing = missing_of_keys({key: sum(one.n_calls for one in known.values()) for key, known in here.items()})
    return missing_after(1 + steps[-1].step, missing) if steps else missing


def _guesses(
    store: Store,
    fabric_id: str,
    keys: Sequence[DecisionKey],
    here: Medians,
    lines: Sequence[CandidateStatistics],
) -> dict[DecisionKey, Guesses]:
    """Expectations of a new job at keys without decisions."""
    from ...learning.explaining.decision_records import guessed
    from ...learning.knowledge import Knowledge
    from ...learning.policy.keys import CandidateTables, KeyState
    from ...modeling.cost_prior import CostPrior
    from ...modeling.trainer import load_correction

    costs = CostPrior(store.fabrics().get(fabric_id, {}))
    book = CandidateTables(costs)
    book.knowledge = Knowledge(lines, *load_correction(store, fabric_id)).without_chunk_sizes()
    states = []
    for index, key in enumerate(keys):
        low, high = size_class_range(key.size_class)
        state = KeyState(index, key, math.sqrt(low * high))
        own = here[key].get(BASELINE)
        if own is not None and own.setting.protocol is not None:
            state.default_setting = own.setting
        for found in here[key].values():
            costs.learn_channels(key.communicator, found.setting.n_channels)
        book.register(state)
        states.append(state)
    return {state.key: (book.knowledge.model_id, guessed(state, book.of(state))) for state in states}
