"""The state of a daemon and its jobs for pages and terminals, in plain words and numbers."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from ...store import wire
from ...store.paths import default_endpoint
from ...store.records import Decision, DecisionKey, size_class_range
from ...store.records.job_names import titled
from ..client.beside import beside
from ..client.late import late, who
from ..client.mistimed import mistimed
from ..client.passed_by import passed_by
from ..client.status import exposure_text, fleet_text, is_well, may_try, store_text, workload_of
from ..offline.explaining.values import Explanation
from ..offline.jobs.listing import Gain
from ..offline.size_ranges import rounded_range
from .history import JobHistory

MAX_ENDED: Final = 5


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A finished step."""

    step: int
    duration_us: float
    exposed_us: float | None
    epoch: int


class DecisionLine(msgspec.Struct, frozen=True):
    """A decision in words."""

    step: int | None
    epoch: int
    kind: str
    setting: str
    where: str
    """Collective, phase and sizes; empty: the decision is about the whole job."""
    reason: str


class KeyLine(msgspec.Struct, frozen=True):
    """One key: its share of a step, and its setting."""

    where: str
    """Collective, phase and sizes."""
    step_percent: float | None
    """Share of a step's time, whether hidden by computation or not; None: not measured."""
    setting: str
    saved_percent: float | None
    """Saved share of a step's time relative to NCCL's own choice; None: not measured."""
    on_trial: str
    """The setting on trial; empty: none is."""
    is_trial_to_come: bool
    """Whether the trial begins with the next plan."""


class Straggler(msgspec.Struct, frozen=True):
    """A rank or node that others wait for."""

    who: str
    late_us: float
    share: float
    """Share of the observed steps in which it was late."""


class Notice(msgspec.Struct, frozen=True):
    """A sentence that people should read."""

    text: str
    is_bad: bool = False


class JobView(msgspec.Struct, frozen=True, omit_defaults=True):
    """One job."""

    job_id: str
    title: str
    health: str
    is_well: bool
    workload: str
    fabric_id: str
    n_ranks: int
    n_ranks_seen: int
    epoch: int
    step: int
    step_us: float
    """Median of the latest steps."""
    exposed_us: float | None
    """Median of the latest steps; None: not measured."""
    heard_s_ago: float
    observations_per_s: float
    n_dropped: int
    n_explored: int
    spent_percent: float
    """The cost of exploration, in percent of step time."""
    notices: Sequence[Notice] = ()
    wait_us: float = 0.0
    """Time per step that collectives wait for the last rank."""
    transfer_us: float = 0.0
    """The other time of collectives per step."""
    stragglers: Sequence[Straggler] = ()
    steps: Sequence[Step] = ()
    decisions: Sequence[DecisionLine] | None = None
    """Decisions, newest first; None: as before."""
    keys: Sequence[KeyLine] | None = None
    """Keys by their time in a step, the largest first; None: as before, or not known yet."""
    gain: Gain | None = None
    """The gain over NCCL's own choice; None: not known yet."""
    exposure: str = "unknown"
    """The share of communication that is exposed, in words."""


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a daemon and its jobs."""

    endpoint: str
    problem: str = ""
    """Why the snapshot is empty; an empty text: a daemon answered."""
    daemon: str = ""
    """The daemon's version and process."""
    uptime_s: float = 0.0
    resident_bytes: int = 0
    n_errors: int = 0
    n_refused: int = 0
    store_path: str = ""
    options: str = ""
    budget_percent: float | None = None
    """Allowed cost of exploration, in percent of step time; None: there is no limit, or it is unknown."""
    notices: Sequence[Notice] = ()
    jobs: Sequence[JobView] = ()
    next_steps: Sequence[tuple[str, str]] = ()
    """Useful next commands, each with its purpose; empty if there are jobs."""


def snapshot_of(reply: wire.StatusReply, histories: Mapping[str, JobHistory], history_problem: str = "") -> Snapshot:
    """The snapshot of a daemon's answer and its store, with all known steps and decisions.

    `histories` are by job id, and may lack jobs. `history_problem` is the reason why the store cannot be read here.
    """
    options = reply.options
    notices = [Notice(words, style == "bold red") for words, style in (*store_text(reply), *fleet_text(reply.fleet))]
    for ended in reply.ended[:MAX_ENDED]:
        notices.append(Notice(f"{titled(ended.job_id, ended.name)}: {ended.describe()}"))
    if history_problem and reply.jobs:
        notices.append(Notice(f"steps, decisions and keys are not shown: {history_problem}"))
    return Snapshot(
        endpoint=reply.endpoint,
        daemon=f"daemon {reply.version} (pid {reply.daemon_pid})",
        uptime_s=reply.uptime_s,
        resident_bytes=reply.resident_bytes,
        n_errors=reply.n_errors,
        n_refused=reply.n_refused,
        store_path=reply.store_path,
        options="" if options is None else may_try(options),
        budget_percent=options.budget_percent if options is not None and options.explore else None,
        notices=notices,
        jobs=[_job(job, histories.get(job.job_id)) for job in reply.jobs],
        next_steps=() if reply.jobs else _next_steps(reply),
    )


def _next_steps(reply: wire.StatusReply) -> Sequence[tuple[str, str]]:
    to_it = "" if reply.endpoint == default_endpoint() else f" --endpoint {shlex.quote(reply.endpoint)}"
    return (
        (f"zerotune launch{to_it} -- COMMAND", "train, tuned: COMMAND stays as it is"),
        (f"zerotune jobs --store {shlex.quote(reply.store_path)}", "what earlier jobs gained"),
    )


def since(snapshot: Snapshot, before: Snapshot) -> Snapshot:
    """The snapshot without parts that `before` has already: older steps, and unchanged decisions and keys."""
    known = {job.job_id: job for job in before.jobs}
    return msgspec.structs.replace(
        snapshot, jobs=[_job_since(job, known[job.job_id]) if job.job_id in known else job for job in snapshot.jobs]
    )


def _job_since(job: JobView, before: JobView) -> JobView:
    last = before.steps[-1].step if before.steps else -1
    return msgspec.structs.replace(
        job,
        steps=[one for one in job.steps if one.step > last],
        decisions=None if job.decisions == before.decisions else job.decisions,
        keys=None if job.keys == before.keys else job.keys,
    )


def _job(job: wire.JobStatus, history: JobHistory | None) -> JobView:
    notices = [Notice(words) for words in (*late(job.lateness), *mistimed(job.passages))]
    for what, words in (("passed the tuner by", passed_by(job.passages)), ("beside ours", beside(job.passages))):
        if words:
            notices.append(Notice(f"{what}: {words}"))
    if history is None:
        steps: Sequence[Step] = ()
        decisions = [DecisionLine(None, job.epoch, "", "", "", line) for line in reversed(job.last_decisions)]
    else:
        steps = [Step(one.step, one.duration_us, one.exposed_us, one.epoch) for one in history.steps]
        decisions = [_decision(one) for one in reversed(history.decisions)]
    keys = None if history is None else history.keys
    return JobView(
        job_id=job.job_id,
        title=titled(job.job_id, job.name),
        health=job.health,
        is_well=is_well(job),
        workload=workload_of(job),
        fabric_id=job.fabric_id,
        n_ranks=job.n_ranks,
        n_ranks_seen=job.n_ranks_seen,
        epoch=job.epoch,
        step=job.step,
        step_us=job.step_us,
        exposed_us=job.exposed_us,
        exposure=exposure_text(job.exposure),
        heard_s_ago=job.heard_s_ago,
        observations_per_s=job.observations_per_s,
        n_dropped=job.n_dropped,
        n_explored=job.n_explored,
        spent_percent=job.exploration_spent_percent,
        notices=notices,
        wait_us=job.lateness.wait_us,
        transfer_us=job.lateness.transfer_us,
        stragglers=[Straggler(who(one), one.late_us, one.share) for one in job.lateness.late],
        steps=steps,
        decisions=decisions,
        keys=None if keys is None else [_key(one) for one in keys],
        gain=keys[0].job.gain if keys and keys[0].job is not None else None,
    )


def _key(one: Explanation) -> KeyLine:
    return KeyLine(
        where=_where(one.key),
        step_percent=one.step_percent,
        setting=_setting(one.setting),
        saved_percent=one.saved_percent,
        on_trial=_setting(one.on_trial),
        is_trial_to_come=one.is_trial_to_come,
    )


def _decision(decision: Decision) -> DecisionLine:
    where = setting = ""
    if not decision.is_of_job:
        where, setting = _where(decision.key), _setting(str(decision.candidate))
    return DecisionLine(decision.step, decision.epoch, decision.kind, setting, where, decision.reason)


def _where(key: DecisionKey) -> str:
    return f"{key.collective.name}, {key.phase.name}, {rounded_range(*size_class_range(key.size_class))}"


def _setting(candidate: str) -> str:
    return candidate.replace("baseline", "NCCL's own")
