"""The line that rank 0 of a launched job prints at its end: what was tuned and its gain, or why nothing was tuned."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import psutil

from ..store.counted import counted
from ..store.records import PlanRow, size_class
from . import first_group
from .daemon_link.channel import DAEMON_TIMEOUT_S
from .daemon_link.connection import listener_pid
from .emulation import BACKEND, uses_nccl
from .failure import describe_failure
from .reasons import QUIET, Mark, Reason, print_line, remove_mark, untuned, write_mark
from .settings import ENV_LAUNCH, AgentSettings

if TYPE_CHECKING:
    from ..store.step_times import Saved
    from .nccl.library import Plugin
    from .steps.recent_steps import RecentSteps

LEAST_STEPS: Final = 100
"""A job of fewer steps may end before a trial could be finished and judged."""

REPORTED_SHARE: Final = 0.5
"""The line mentions replayed calls if they are more than this share of all calls."""

KEPT_SHARE: Final = 0.25
"""A setting that ran in a smaller share of the latest steps was on trial."""

Question = tuple[int, ...]
"""(ranks, nodes, collective, message bytes) of a collective for which NCCL asked the tuner."""


@dataclass(frozen=True)
class Facts:
    """Facts about the job that rank 0 knows at its end."""

    n_ranks: int
    backends: str
    """`get_backend_config` of the default group."""
    has_plugin: bool = True
    is_loaded: bool = True
    """NCCL has loaded the plugin."""
    has_called: bool = True
    """Collectives ran on the default group."""
    n_calls: int = 0
    n_matched: int = 0
    """Calls to which a row of a plan applied."""
    questions: Sequence[Question] = ()
    rows: Sequence[PlanRow] = ()
    """The rows that `kept` returns."""
    n_steps: int = 0
    saved: Saved | None = None
    """None: too few control windows to compare."""
    has_plan_file: bool = False
    is_exact: bool = False
    """Only collectives that compute nothing may be tuned."""
    has_answered: bool = True
    """A daemon has answered at some time."""
    is_silent: bool = False
    """The daemon that had answered no longer does."""
    listened_s: float = 0.0
    """How long this rank has waited for a daemon."""
    is_absent: bool = False
    """No daemon has answered, and the endpoint is `tcp://`, or no running daemon listens there now."""
    endpoint: str = ""
    shadow: str = ""
    """Changes that a daemon in shadow mode would have made; empty: it is not in shadow mode."""
    failure: str = ""
    """How the script itself failed; empty: no failure is known."""
    reasons: Sequence[tuple[Reason, str]] = ()
    """Reasons that the agreement knows, the most important first."""
    replayed_share: float = 0.0
    """Share of the calls that were replays of captured graphs."""

    @property
    def captured(self) -> list[tuple[Reason, str]]:
        """`Reason.captured`, if most calls were replays of captured graphs; else nothing."""
        return [(Reason.captured, f"{self.replayed_share:.1%}")] if self.replayed_share > REPORTED_SHARE else []


def line(facts: Facts) -> str:
    """The job's last line."""
    n_all = len({_kind(question) for question in facts.questions})
    n_tuned = len({_kind(question) for question in facts.questions if _is_tuned(question, facts.rows)})
    if n_tuned and facts.n_matched:
        reasons = *facts.reasons, *facts.captured
        also = "".join(f"; {reason.value.format(detail=detail)}" for reason, detail in reasons)
        also += "; --numerics exact leaves what computes to NCCL" if facts.is_exact else ""
        also += "" if facts.has_plan_file else "; `zerotune explain`"  # without a daemon it would know nothing
        return f"zerotune: {n_tuned} of {counted(n_all, 'collective')} tuned, {_gain(facts)}{also}"
    return untuned(*_why(facts, counted(n_all, "collective")))


def _why(facts: Facts, collectives: str) -> tuple[Reason, str]:
    """The first reason that applies, and its details."""
    if facts.failure:
        return Reason.script_failed, facts.failure
    if facts.n_ranks == 1:
        return Reason.one_rank, ""
    if BACKEND not in facts.backends and not uses_nccl(facts.backends):
        return Reason.not_nccl, facts.backends
    if not facts.has_plugin:
        return Reason.no_plugin, ""
    if not facts.n_calls:
        return (Reason.not_loaded if facts.has_called and not facts.is_loaded else Reason.no_collectives), ""
    if facts.has_plan_file and not facts.n_matched:
        which = ", of those that compute nothing (--numerics exact)" if facts.is_exact else ""
        return Reason.no_row, collectives + which
    if facts.reasons:
        return facts.reasons[0]
    if facts.captured:
        return facts.captured[0]
    if not facts.n_steps:
        return Reason.no_steps, ""
    if not (facts.has_answered or facts.has_plan_file):
        if facts.listened_s < DAEMON_TIMEOUT_S and not facts.is_absent:
            return Reason.no_repetition, f"{facts.listened_s:.1f} seconds of listening to a daemon"
        return Reason.no_daemon, facts.endpoint
    if facts.shadow:
        return Reason.in_shadow, facts.shadow
    if facts.n_steps < LEAST_STEPS and not facts.n_matched:
        return Reason.no_repetition, counted(facts.n_steps, "step")
    if facts.is_silent:
        return Reason.silent_daemon, facts.endpoint
    return Reason.nothing_better, f"{collectives} in {counted(facts.n_steps, 'step')}"


def can_answer(listener: int | None) -> bool:
    """Whether this process may answer; 0 is one of another container, None is no process."""
    if not listener:
        return listener is not None
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(listener).status() != psutil.STATUS_STOPPED)
    return False


def _gain(facts: Facts) -> str:
    if (saved := facts.saved) is None:
        why = "under a plan file nothing is compared" if facts.has_plan_file else "not yet compared"
        return f"gain unknown: {why} with NCCL's own choice"
    percent, uncertain = 100 * saved.share, 100 * saved.uncertain_share
    if not saved.is_beyond_noise:
        return f"steps neither faster nor slower beyond noise (± {uncertain:.1f} %)"
    change = "faster" if percent > 0 else "slower"
    return f"steps {abs(percent):.1f} % ± {uncertain:.1f} {change} than NCCL's own choice beside them"


def _kind(question: Question) -> Question:
    *others, message_bytes = question
    return *others, size_class(max(1, message_bytes))


def _is_tuned(question: Question, rows: Sequence[PlanRow]) -> bool:
    n_ranks, n_nodes, collective, message_bytes = question
    return any(
        (row.communicator.n_ranks, row.communicator.n_nodes, int(row.collective)) == (n_ranks, n_nodes, collective)
        and row.min_bytes <= message_bytes <= row.max_bytes
        and not row.candidate.is_baseline
        for row in rows
    )


def kept(rows_of: Mapping[int, Sequence[PlanRow]], n_steps: Mapping[int, int]) -> list[PlanRow]:
    """The rows with a setting that is in force for good, not on trial.

    A row is kept if the latest plan has it, or if it ran in enough of the latest steps. A setting that alternates with
    NCCL's own choice for comparison runs in about every second step, a setting on trial in few steps. Both arguments
    are by epoch: rows of the latest plans, and numbers of the latest steps.
    """
    epochs_of: dict[PlanRow, set[int]] = {}
    for epoch, rows in rows_of.items():
        for row in rows:
            if not row.candidate.is_baseline:
                epochs_of.setdefault(msgspec.structs.replace(row, reason="", model_id=""), set()).add(epoch)
    last, least = max(rows_of, default=0), max(1.0, KEPT_SHARE * sum(n_steps.values()))
    return [
        row
        for row, epochs in epochs_of.items()
        if last in epochs or sum(n_steps.get(epoch, 0) for epoch in epochs) >= least
    ]


def print_ending(
    settings: AgentSettings,
    plugin: Plugin | None,
    steps: RecentSteps,
    *,
    n_steps: int,
    questions: Sequence[Question],
    rows_of: Mapping[int, Sequence[PlanRow]],
    has_answered: bool,
    is_silent: bool,
    listened_s: float,
    shadow: str = "",
    reasons: Sequence[tuple[Reason, str]] = (),
    replayed_share: float = 0.0,
) -> None:
    """Print the line, if this is rank 0 of a launched job that has the agent and is not quiet.

    `plugin` is None if it could not be loaded. `kept` explains `rows_of`, and `Facts` the other arguments.
    """
    failure = describe_failure()
    is_reported_by_watcher = bool(failure) and write_mark(Mark.failed, failure)
    group = first_group.made()
    if os.environ.get(ENV_LAUNCH) != "1" or not settings.agent_on or group is None or group.rank != 0:
        return
    write_mark(Mark.reported)
    if not failure:  # an earlier failure was followed by a restart
        remove_mark(Mark.failed)
    if os.environ.get(QUIET) == "1":
        return
    counts = plugin.counters() if plugin is not None else None
    rows, endpoint = kept(rows_of, steps.epochs()), settings.endpoint
    facts = Facts(
        n_ranks=group.n_ranks,
        backends=group.backends,
        has_plugin=plugin is not None,
        is_loaded=plugin is not None and plugin.tuner_abi() != 0,
        has_called=first_group.has_called(),
        n_calls=counts.n_calls if counts is not None else 0,
        n_matched=counts.n_matched if counts is not None else 0,
        questions=questions,
        rows=rows,
        n_steps=n_steps,
        saved=steps.saved(),
        has_plan_file=settings.plan_path is not None,
        is_exact=settings.is_exact,
        has_answered=has_answered,
        is_silent=is_silent,
        listened_s=listened_s,
        is_absent=not has_answered and (endpoint.startswith("tcp://") or not can_answer(listener_pid(endpoint))),
        shadow=shadow,
        failure=failure,
        endpoint=endpoint,
        reasons=reasons,
        replayed_share=replayed_share,
    )
    text = line(facts)
    if not (is_reported_by_watcher and text.endswith(f"({Reason.script_failed.name})")):
        print_line(text)
