"""Asks a daemon for its status and shows the answer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...agent.daemon_link.asking import fetch_status as fetch_status
from ...agent.daemon_link.node_service import has_service
from ...store import wire
from ...store.counted import counted, size_text
from ...store.errors import UserError
from ...store.paths import default_endpoint
from ...store.records import Exposure, HowKnown, MissingEvidence, Stage
from ...store.records.job_names import titled
from .beside import beside
from .holders import Holder
from .late import late
from .misaligned import to_be_padded
from .mistimed import mistimed
from .passed_by import passed_by

if TYPE_CHECKING:
    from rich.console import Console


FORWARDS: Final = "forwards to "
"""Beginning of the health text of a job that another node's daemon tunes."""


def no_answer(endpoint: str, holder: Holder | None) -> UserError:
    """The error about a daemon that does not answer; `holder` is None if none runs on this machine."""
    if holder is None and endpoint == default_endpoint() and has_service():
        return UserError(
            "the node's service for all users runs no daemon of yours now",
            "`zerotune launch` has it start one; `zerotune jobs` lists earlier jobs",
        )
    if holder is None and endpoint.startswith("tcp://"):
        problem = f"no daemon answers at {endpoint}, or it has other keys"
        return UserError(problem, "start one there, or give its keys with --curve-keys")
    if holder is None:
        return UserError(
            f"no daemon answers at {endpoint}",
            "start one with `zerotune daemon`, or list earlier jobs with `zerotune jobs`",
        )
    state, remedy = "does not answer", "ask again in a while"
    if holder.is_stopped:
        state, remedy = "is stopped", f"`kill -CONT {holder.pid}` lets it go on"
    return UserError(
        f"the daemon at {endpoint} (pid {holder.pid}) {state}, while training goes on",
        f"{remedy}, `kill {holder.pid}` ends it",
    )


_MISSING: Final = {
    MissingEvidence.no_collectives: "no collective was seen that NCCL asks a tuner about",
    MissingEvidence.only_small: "every collective is as small as a counter or a flag",
    MissingEvidence.nothing_reduced: "no gradients are sent: nothing larger than a flag is reduced",
    MissingEvidence.one_size: (
        "all are all-reduces of one size, as of DDP with one bucket or with equal ones, and of tensor parallelism"
    ),
    MissingEvidence.no_repetition: "no two steps were seen that are alike",
    MissingEvidence.too_early: "too early to tell: steps have to repeat first",
    MissingEvidence.ambiguous: "several kinds of training, or none that is known, send what was seen",
    MissingEvidence.incomplete: "the trace does not tell the size of some collectives, which may be those that matter",
}


def exposure_text(exposure: Exposure) -> str:
    """The share of communication that computation waits for, and how it is known."""
    if exposure.how is HowKnown.unknown:
        return "unknown"
    return f"{100 * exposure.least:.0f} to {100 * exposure.most:.0f} % ({exposure.how.value})"


def workload(stage: Stage, missing: MissingEvidence = MissingEvidence.nothing) -> str:
    """The kind of training of a job, in words that follow the job's ranks, or why it is not known."""
    if stage is not Stage.unknown:
        return f"workload {stage.name}"
    words = "workload not recognised" + (" yet" if missing is MissingEvidence.too_early else "")
    return f"{words} ({in_words(missing)})" if missing else words


def workload_of(job: wire.JobStatus) -> str:
    """The kind of training of a connected job, the other daemon that tunes it, if any, and whether it is frozen."""
    _, _, leader = job.health.partition(FORWARDS)
    if leader:
        return f"workload recognised and tuned by the daemon at {leader}, which gets what is measured here"
    frozen = f", tuning frozen since step {job.frozen_since:,}" if job.frozen_since else ""
    return workload(job.stage, job.missing_evidence) + frozen


def is_well(job: wire.JobStatus) -> bool:
    """Whether a job has no problem."""
    return job.health == "ok" or job.health.startswith(FORWARDS)


def in_words(missing: MissingEvidence) -> str:
    """The missing evidence of a stage in words; empty if none is missing."""
    return _MISSING.get(missing, "")


def may_try(options: wire.DaemonOptions) -> str:
    """The limits of a daemon's trials, as options of `zerotune daemon`."""
    budget = f"--budget-percent {options.budget_percent:g}" if options.explore else "--no-explore"
    shadow = " --shadow (nothing that is decided is carried out)" if options.shadow else ""
    exact = " --numerics exact" if options.exact else ""
    limits = f" --tune-for {options.tune_steps}" if options.tune_steps else ""
    limits += f" --compare {options.compare_steps}" if options.compare_steps else ""
    return f"options {budget} --memory-threshold {options.memory_threshold:g}{exact}{limits}{shadow}"


def store_text(reply: wire.StatusReply) -> Iterator[tuple[str, str]]:
    """(text, style) about failures to write the store; none if there were none."""
    store, folder = reply.store, Path(reply.store_path).parent
    lost = f"{counted(store.n_lost, 'record')} lost"
    if store.is_gone:
        yield (
            f"{reply.health}: the store's file was removed or moved away: what is recorded goes with it."
            f" `kill {reply.daemon_pid}`, put back what was there, and start the daemon anew",
            "bold red",
        )
    if store.damage:
        n_missing = "an unknown number" if store.n_missing is None else f"{store.n_missing:,}"
        yield (
            f"{reply.health}: the store's file was damaged ({store.damage}): what is measured goes into a new one."
            f" {counted(store.n_recovered, 'measurement')} recovered, {n_missing} lost. The old file is kept as"
            f" {store.set_aside}. Look at the disk",
            "bold red",
        )
    if store.is_out:
        room = f", {size_text(free_bytes)} free" if (free_bytes := _free_bytes(folder)) is not None else ""
        yield (
            f"{reply.health}: the store cannot be written for {store.failed_s_ago:.0f} s: {store.error};"
            f" {counted(store.n_waiting, 'record')} waiting in memory, {lost if store.n_lost else 'none lost'}."
            f" Mend it ({folder}{room}): what waits is written then, and lost if the daemon ends before",
            "bold red",
        )
    elif store.n_lost:
        yield f"{lost}, the last {store.failed_s_ago:.0f} s ago ({store.error}); the store is written now", "yellow"


def fleet_text(fleet: wire.FleetState) -> Iterator[tuple[str, str | None]]:
    """(text, style) about sharing with other nodes; none if this daemon does not share."""
    if fleet.book:
        yield f"book {fleet.book}: {counted(fleet.n_book_winners, 'setting')} to try first", None
    if fleet.book_error:
        yield f"  not believed: {fleet.book_error}", "bold red"
    if not fleet.url:
        return
    lost = f", {counted(fleet.n_lost, 'measurement')} lost" if fleet.n_lost else ""
    whom = f" as {fleet.contributor}, key {fleet.key}" if fleet.contributor else ""
    written = f"{counted(fleet.n_written, 'measurement')} in {counted(fleet.n_objects, 'object')} written"
    yield f"fleet {fleet.url}{whom}: {written}, {fleet.n_waiting:,} waiting{lost}", "yellow" if fleet.n_lost else None
    if fleet.is_failing:
        yield f"  cannot be written for {fleet.failed_s_ago:.0f} s: {fleet.error}", "bold red"


def _free_bytes(folder: Path) -> int | None:
    """Free bytes on the disk; None if unknown, as on another machine."""
    try:
        return shutil.disk_usage(folder).free
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None


def render_status(reply: wire.StatusReply, console: Console) -> None:
    """Print the daemon's state, some lines per job: a table would not fit on a terminal."""
    def show(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    show(
        f"daemon {reply.version} (pid {reply.daemon_pid}) at {reply.endpoint}, up {reply.uptime_s:.0f} s,"
        f" {size_text(reply.resident_bytes)}, {reply.n_errors} failures of its own,"
        f" {reply.n_refused} bad messages and records refused\nstore {reply.store_path}"
        + (f"\nother nodes reach it at {reply.listen}" if reply.listen else "")
    )
    if reply.options is not None:
        show(may_try(reply.options))
    for words, style in (*store_text(reply), *fleet_text(reply.fleet)):
        show(words, style)
    if not reply.jobs:
        show("no job is connected")
    for ended in reply.ended:
        show(f"{titled(ended.job_id, ended.name)}: {ended.describe()}", "yellow" if ended.failure else "dim")
    for job in reply.jobs:
        exposed = f"{job.exposed_us / 1000:.2f} ms" if job.exposed_us is not None else exposure_text(job.exposure)
        show(
            f"\n{titled(job.job_id, job.name)}: {job.health}, heard {job.heard_s_ago:.1f} s ago",
            "bold green" if is_well(job) else "bold red",
        )
        show(
            f"  {job.n_ranks_seen} of {job.n_ranks} ranks, {workload_of(job)},"
            f" fabric {job.fabric_id}\n"
            f"  step {job.step:,} ({job.step_us / 1000:.2f} ms, communication exposed {exposed}), epoch {job.epoch},"
            f" {job.observations_per_s:.0f} observations/s, {job.n_dropped:,} dropped\n"
            f"  {job.n_explored:,} calls ran settings still on trial,"
            f" which cost {job.exploration_spent_percent:.2f} % of step time"
        )
        if words := passed_by(job.passages):
            show(f"  passed the tuner by: {words}")
        if words := beside(job.passages):
            show(f"  beside ours: {words}")
        for words in (*late(job.lateness), *to_be_padded(job.misaligned), *mistimed(job.passages)):
            show(f"  {words}", "yellow")
        for line in job.last_decisions:
            show(f"  {line}", "dim")
