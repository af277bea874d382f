"""`zerotune explain`: why each setting is what it is, read back from the store's decisions and measurements."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from zerotune.agent.nccl.catalog import parse_collective
from zerotune.store.errors import UserError
from zerotune.store.lateness import Lateness
from zerotune.store.misaligned import Misaligned, misaligned
from zerotune.store.records import (
    BASELINE,
    Candidate,
    CandidateStatistics,
    CommunicatorClass,
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
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.reading.measured_calls import MeasuredCalls
from zerotune.tuner.client.beside import baseline
from zerotune.tuner.decided import decisions_that_ran, settled_decisions, since_takeover
from zerotune.tuner.fingerprint.missing import missing_after, missing_of_keys
from zerotune.tuner.learning.policy.overrides import Override
from zerotune.tuner.modeling.equal_channels import as_offered
from zerotune.tuner.modeling.medians import MeasuredSetting, Medians, medians
from zerotune.tuner.modeling.statistics import statistics
from zerotune.tuner.offline.comparison import alternatives_of, compare
from zerotune.tuner.offline.jobs.before_after import JobsRead, of_job
from zerotune.tuner.offline.jobs.finding import job_of
from zerotune.tuner.offline.jobs.listing import Gain, gain_of


class Head(msgspec.Struct, frozen=True):
    """Whose decisions are explained."""

    job_id: str
    fabric_id: str
    emulated: str
    """Name of the fabric that the NCCL was emulated on; empty: it was real."""
    n_ranks: int
    communicators: list[CommunicatorClass]
    """Communicator classes of the collectives that the store has of it."""
    stage: str = Stage.unknown.name
    """The kind of training that they show."""
    missing_evidence: MissingEvidence = MissingEvidence.nothing
    """Evidence without which no stage can be named."""
    name: str = ""
    """What people call the job."""
    baseline: str = ""
    """The tuner whose choice runs where no plan applies; empty: it is NCCL's own."""
    lateness: Lateness = Lateness()
    """Which of its ranks collectives waited for."""
    misaligned: tuple[Misaligned, ...] = ()
    """Sizes that NCCL would run faster if they were padded, the largest first."""
    n_damaged: int = 0
    """Measurements whose rows in the store are damaged: left out of all but the counts of calls."""
    gain: Gain | None = None
    """Of its steps as a whole, as `zerotune jobs` has it."""
    n_impossible_times: int = 0
    """Collectives to which NCCL gave the times of others: not measured, and not counted."""


class Explanation(msgspec.Struct, frozen=True):
    """One decision key: what runs there, what else is possible, and why."""

    key: DecisionKey
    collective: str
    phase: str
    min_bytes: int
    max_bytes: int
    decision: Decision | None
    """The decision that put the setting in force, without its alternatives; None where nothing was decided yet."""
    alternatives: list[dict[str, Any]]
    """Every candidate: what was expected of it at the key's last decision, with the 90 % interval
    (`predicted_us`, `predicted_low_us`, `predicted_high_us`, None for what ran without having been weighed;
    `is_guess` where nothing that this job measured had a part in that); what the last decision had seen of it
    (`measured_us`, `n_measurements`) and had spent on trying it (`spent_us`); what was found (`note`), when
    (`noted_step`, `noted_epoch`), and whether another setting has come into force since (`is_past`); and what is
    in the store by now: median and calls of this job (`job_median_us`, `n_this_job`) and of all jobs on the fabric
    (`median_us`, `n_all_jobs`).
    """
    is_guess: bool
    """Whether the expectations are starting guesses."""
    decided_at_s: float | None
    """When the last decision was taken; None: never."""
    n_explored: int
    """Candidates that were on trial in some step."""
    spent_us: float
    """What exploring this key had cost by the last decision, as the budget counts it."""
    history: list[str]
    setting: str = str(BASELINE)
    """The setting in force: that of the last decision of which a plan was adopted."""
    not_adopted: str = ""
    """The last decision, where no step has run under a plan with it."""
    on_trial: str = ""
    """The candidate whose trial the last decision began."""
    is_trial_to_come: bool = False
    """Whether no step has yet run under a plan with `on_trial`."""
    model_id: str = ""
    """Whose predictions the expectations rest on; empty: NCCL's own cost."""
    job_history: list[str] = []
    """Decisions that concern all keys: changes of training's pace and of the network, other plans on trial."""
    job: Head | None = None
    calls_per_step: float | None = None
    """Mean calls in the steps that were measured; None where none was."""
    step_percent: float | None = None
    """What its calls take under the setting in force, in percent of a step's time, hidden by computation or not."""
    saved_us: float | None = None
    """Time saved per step against NCCL's own choice, by measured medians; negative: lost; None: not measured."""
    saved_percent: float | None = None
    """`saved_us` in percent of a step's time under NCCL's own choice, as `zerotune jobs` has it where it knows one."""
    runs_as: str = Override.incumbent.name
    """Why it runs what it runs, as far as that is decided key by key: the name of an `Override`."""
    is_quiet: bool = False
    """NCCL's own choice is in force there: nothing is saved or lost, whatever was tried."""


def explain(
    store_path: Path, job_id: str | None, collective: str | None, phase: str | None, message_bytes: int | None
) -> list[Explanation]:
    """Explanations of one job's keys, those first that take most of a step.

    Args:
        job_id: id or name of the job; None: the newest that trained.
        collective: only keys of this collective; None: all.
        phase: only keys of this phase; None: all.
        message_bytes: only the size class of this total size; None: all.

    Raises:
        UserError: no such job, an unknown collective or phase, or a size below 1.
        StoreError: there is no store, or it cannot be read.
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
        job = job_of(store, job_id)
        decisions = store.decisions(job_id=job.job_id)
        fabrics = dict.fromkeys([job.fabric_id, *(decision.fabric_id for decision in decisions)])
        lines = [line for fabric_id in fabrics for line in statistics(store, fabric_id)]
        here = medians([line for fabric_id in fabrics for line in statistics(store, fabric_id, job.job_id)])
        by_key = by_keys([decision for decision in decisions if is_wanted(decision.key)])
        undecided = [key for key in here if key not in by_key and is_wanted(key)]
        if not decisions and not store.steps(job.job_id):
            undecided = []  # it did not train: a sweep, an import
        guesses = _guesses(store, job.fabric_id, undecided, here, lines) if undecided else {}
        jobs = JobsRead(store)
        head = _head(store, jobs, job, decisions, here)
        highest_epoch = store.highest_epoch(job.job_id)
        calls, steps = store.measured_calls(job.job_id), store.steps(job.job_id)
        changes = of_job(jobs, job).changes
    current, everywhere = set(since_takeover(decisions)), medians(lines)
    found = explained(by_key, here, everywhere, guesses, news_of(decisions), current, highest_epoch)
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
    """What the key's calls take of a step, and what its setting saves of one under NCCL's own choice."""
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
    """The job that `explain` explains.

    Raises:
        UserError: no such job.
        StoreError: there is no store, or it cannot be read.
    """
    with Store.open(store_path, read_only=True) as store:
        job = job_of(store, job_id)
        here = medians(statistics(store, job.fabric_id, job.job_id))
        return _head(store, JobsRead(store), job, store.decisions(job_id=job.job_id), here)


def _head(store: Store, jobs: JobsRead, job: JobRecord, decisions: Sequence[Decision], here: Medians) -> Head:
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
    )


def why_unknown(job: JobRecord, here: Medians, steps: Sequence[StepRecord]) -> MissingEvidence:
    """Why a job's measured collectives do not show what kind of training it is.

    Args:
        steps: its steps, in order.

    Returns:
        `MissingEvidence.nothing` where they do.
    """
    if job.stage is not Stage.unknown:
        return MissingEvidence.nothing
    missing = missing_of_keys({key: sum(one.n_calls for one in known.values()) for key, known in here.items()})
    return missing_after(1 + steps[-1].step, missing) if steps else missing


def by_keys(decisions: Sequence[Decision]) -> dict[DecisionKey, list[Decision]]:
    """Decisions by key, in order; those that concern the whole job are left out."""
    found: dict[DecisionKey, list[Decision]] = {}
    for decision in decisions:
        if not decision.is_of_job:
            found.setdefault(decision.key, []).append(decision)
    return found


def news_of(decisions: Sequence[Decision]) -> list[str]:
    """Decisions that concern the whole job, as text, in order."""
    told = (one for one in decisions if one.is_of_job and not one.is_control)
    return [f"{when(decision)}: {decision.reason}" for decision in told]


Guesses = tuple[str, list[dict[str, Any]]]
"""The model, and what it expects of every candidate of a key."""


def explained(
    decisions: Mapping[DecisionKey, Sequence[Decision]],
    here: Medians,
    everywhere: Medians,
    guesses: Mapping[DecisionKey, Guesses],
    job_history: list[str],
    current: Collection[Decision],
    highest_epoch: int | None = None,
) -> list[Explanation]:
    """Explanations by key, from each key's decisions or, where there are none, from guesses.

    Args:
        decisions: by key, in the order they were taken.
        guesses: predictions for keys without decisions.
        current: those of the daemon that decided last; the others are history only.
        highest_epoch: decisions that only later plans hold are not in force; None: it is not known.

    Returns:
        One explanation per key, in the order of keys.
    """
    keys = sorted({*decisions, *guesses})
    return [
        _explanation(
            key,
            decisions.get(key, ()),
            here.get(key, {}),
            everywhere.get(key, {}),
            guesses.get(key),
            job_history,
            current,
            highest_epoch,
        )
        for key in keys
    ]


def deciding(settled: Sequence[Decision]) -> Decision | None:
    """The decision that put the present setting in force, of a key's decisions without those that began trials."""
    if not settled:
        return None
    n_since = next(
        (n for n, one in enumerate(reversed(settled)) if one.candidate != settled[-1].candidate), len(settled)
    )
    since = settled[-n_since:]
    chosen = [one for one in since if one.kind in (DecisionKind.promote, DecisionKind.prior, DecisionKind.provisional)]
    if chosen:
        return chosen[-1]
    return since[0] if since[0].kind == DecisionKind.rollback else since[-1]


def when(decision: Decision) -> str:
    """The time, the step and the epoch of a decision."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(decision.decided_at_s))
    step = "" if decision.step is None else f", step {decision.step}"
    return f"{clock}{step}, epoch {decision.epoch}"


def _explanation(
    key: DecisionKey,
    decisions: Sequence[Decision],
    here: Mapping[Candidate, MeasuredSetting],
    everywhere: Mapping[Candidate, MeasuredSetting],
    guesses: Guesses | None,
    job_history: list[str],
    current: Collection[Decision],
    highest_epoch: int | None,
) -> Explanation:
    settled = [one for one in decisions if one.kind != DecisionKind.explore and one in current]
    ran = decisions_that_ran(decisions, highest_epoch)
    in_force = [one for one in ran if one.kind != DecisionKind.explore and one in current]
    low, high = size_class_range(key.size_class)
    last = decisions[-1] if decisions else None
    model_id, alternatives = guesses or ("", [])
    if last is not None:  # of any kind: it saw the most evidence
        model_id, alternatives = last.model_id, alternatives_of(last)
    decision = deciding(settled)
    setting = str(in_force[-1].candidate if in_force else BASELINE)
    decided = str(settled[-1].candidate if settled else BASELINE)
    is_on_trial = last is not None and last.kind == DecisionKind.explore and last in current
    is_guess = bool(alternatives) and all(one.get("is_guess", False) for one in alternatives)
    offered = {str(one["candidate"]) for one in alternatives}
    here, everywhere = (as_offered(known, offered, key) for known in (here, everywhere))
    alternatives = [*alternatives, *_unweighed(alternatives, here, everywhere)]
    _add_medians(alternatives, here, everywhere)
    _date_notes(alternatives, decisions, decided)
    return Explanation(
        key=key,
        collective=key.collective.name,
        phase=key.phase.name,
        min_bytes=low,
        max_bytes=high,
        decision=None if decision is None else msgspec.structs.replace(decision, alternatives="[]"),
        alternatives=alternatives,
        is_guess=is_guess,
        decided_at_s=None if last is None else last.decided_at_s,
        n_explored=len({decision.candidate for decision in ran if decision.kind == DecisionKind.explore}),
        spent_us=sum(float(one.get("spent_us", 0.0)) for one in alternatives),
        history=[f"{when(d)}: {d.kind} {d.candidate}: {d.reason}" for d in decisions],
        setting=setting,
        not_adopted=decided if decided != setting else "",
        on_trial=str(last.candidate) if last is not None and is_on_trial else "",
        is_trial_to_come=is_on_trial and last not in ran,
        model_id=model_id,
        job_history=job_history,
        runs_as=_runs_as(None if decision is None else decision.kind, is_on_trial=is_on_trial and last in ran).name,
    )


def _runs_as(kind: str | None, *, is_on_trial: bool) -> Override:
    """The first of the list that applies, by the kind of decision that put the setting in force."""
    if is_on_trial:
        return Override.trial
    if kind == DecisionKind.prior:
        return Override.proven
    return Override.provisional if kind == DecisionKind.provisional else Override.incumbent


def _unweighed(
    alternatives: Collection[Mapping[str, Any]],
    here: Mapping[Candidate, MeasuredSetting],
    everywhere: Mapping[Candidate, MeasuredSetting],
) -> list[dict[str, Any]]:
    """Lines for what was measured, but is not among the candidates that the last decision weighed."""
    measured = {str(candidate): candidate for candidate in (*here, *everywhere)}
    known = {str(one["candidate"]) for one in alternatives}
    # Some are what NCCL made of a candidate that was asked for, of which a decision has seen the same calls.
    renamed = {
        name.rpartition("/")[0]
        for one in alternatives
        if one.get("n_measurements") and (name := str(one["candidate"])) not in measured
    }
    return [
        {
            "candidate": name,
            "predicted_us": None,
            "predicted_low_us": None,
            "predicted_high_us": None,
            "is_guess": False,
            "measured_us": None,
            "n_measurements": 0,
            "spent_us": 0.0,
            "note": "",
        }
        for name in measured
        if name not in known and name.rpartition("/")[0] not in renamed
    ]


def _add_medians(
    alternatives: Sequence[dict[str, Any]],
    here: Mapping[Candidate, MeasuredSetting],
    everywhere: Mapping[Candidate, MeasuredSetting],
) -> None:
    by_name = [{str(candidate): found for candidate, found in known.items()} for known in (here, everywhere)]
    for one in alternatives:
        # The decision has seen what the store no longer has, or has under the name of what really ran.
        seen = one.get("measured_us"), one.get("n_measurements", 0)
        mine, all_jobs = (known.get(str(one["candidate"])) for known in by_name)
        one["job_median_us"], one["n_this_job"] = (mine.median_us, mine.n_calls) if mine is not None else seen
        counted = all_jobs is not None and all_jobs.n_calls >= one["n_this_job"]
        one["median_us"], one["n_all_jobs"] = (
            (all_jobs.median_us, all_jobs.n_calls)
            if all_jobs is not None and counted
            else (one["job_median_us"], one["n_this_job"])
        )


def _date_notes(alternatives: Sequence[dict[str, Any]], decisions: Sequence[Decision], setting: str) -> None:
    """Add to each note when it was taken; drop old notes against the setting that is now in force."""
    settled = [(at, one) for at, one in enumerate(decisions) if one.kind != DecisionKind.explore]
    in_force_at = next((at for at, one in reversed(settled) if str(one.candidate) != setting), -1) + 1
    for one in alternatives:
        name, note = str(one["candidate"]), one.get("note") or ""
        said = next((at for at in reversed(range(len(decisions))) if _says(decisions[at], name, note)), None)
        one["note"] = "" if name == setting else note
        one["noted_step"] = decisions[said].step if note and said is not None else None
        one["noted_epoch"] = decisions[said].epoch if note and said is not None else None
        one["is_past"] = bool(note) and said is not None and said < in_force_at


def _says(decision: Decision, name: str, note: str) -> bool:
    if decision.reason.startswith(f"{name}: {note}"):
        return True
    return note == f"given up: {decision.reason}" or (
        str(decision.candidate) == name and decision.reason.startswith(note)
    )


def _guesses(
    store: Store,
    fabric_id: str,
    keys: Sequence[DecisionKey],
    here: Medians,
    lines: Sequence[CandidateStatistics],
) -> dict[DecisionKey, Guesses]:
    """What a job that began now would expect at keys of which nothing has been decided."""
    from zerotune.tuner.learning.explaining.decision_records import guessed
    from zerotune.tuner.learning.knowledge import Knowledge
    from zerotune.tuner.learning.policy.keys import CandidateTables, KeyState
    from zerotune.tuner.modeling.features import CostPrior
    from zerotune.tuner.modeling.trainer import load_correction

    costs = CostPrior(store.fabrics().get(fabric_id, {}))
    book = CandidateTables(costs)
    book.knowledge = Knowledge(lines, *load_correction(store, fabric_id))
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
