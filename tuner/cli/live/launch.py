"""`zerotune launch`."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....store.errors import UntrustedError, UserError
from ..fleet_options import BookKey, BookUrl, Contributor, Fleet, Listen, fleet_arguments, refuse_impossible
from ..options import CurveKeys, Endpoint, FabricName, StorePath, a_job_name
from ..paths import output_file, store_path, to_be_named
from ..sizes import megabytes
from ..trial_options import (
    BudgetPercent,
    Compare,
    MemoryThreshold,
    NoExplore,
    Numerics,
    NumericsChoice,
    Shadow,
    TuneFor,
    brain_settings,
    given_arguments,
)

if TYPE_CHECKING:
    from ....agent.launch import LaunchRequest
    from ....store.wire import DaemonOptions, StatusReply
    from ...environment.candidates import Candidate

IDLE_EXIT_S = 1800.0
"""A started daemon ends after this time without a rank; large models load for minutes before they train."""


OF_THE_JOB = ("--numerics", "--shadow", "--tune-for", "--compare", "--tune-environment", "--chunk-sizes")
OWN_STEPS = 24
"""Steps with NCCL's own choice at the beginning of a job whose environment is tuned."""
EXCLUDING = (
    ("--no-agent", "--plan", "without the agent no plan comes into force"),
    ("--no-agent", "--log-trace", "without the agent no collective is logged"),
    *(("--no-agent", one, "without the agent nothing is tuned") for one in OF_THE_JOB),
    ("--no-agent", "--daemon", "without the agent nobody speaks to a daemon"),
    ("--plan", "--daemon", "under a plan file training runs without any daemon"),
    *(("--plan", one, "under a plan file nothing is tuned") for one in OF_THE_JOB[1:]),
    ("--shadow", "--compare", "in shadow nothing is tuned that could be compared"),
    ("--shadow", "--tune-environment", "in shadow nothing is changed, and so no variable"),
)
"""Pairs of options that contradict each other, and why."""
OF_THE_DAEMON = (
    *("--store", "--budget-percent", "--memory-threshold", "--no-explore"),
    *("--listen", "--fleet", "--contributor", "--book", "--book-key"),
)


def launch(
    command: Annotated[list[str], typer.Argument(help="The training command, after `--`.")],
    fabric: FabricName = None,
    endpoint: Endpoint = None,
    curve_keys: CurveKeys = None,
    daemon: Annotated[
        bool | None,
        typer.Option(
            "--daemon/--no-daemon",
            help="Start a daemon if none answers; it ends 30 minutes after its last job, or with the scheduler's job.",
            show_default="--daemon, but for tcp://",
            envvar="ZEROTUNE_DAEMON",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the job, for `zerotune jobs` and other commands.",
            callback=a_job_name,
            envvar="ZEROTUNE_JOB_NAME",
        ),
    ] = None,
    store: StorePath = None,
    log_trace: Annotated[
        Path | None, typer.Option(help="Log every collective into this folder, for `zerotune replay`.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Run under this plan file, without a daemon.")] = None,
    summary: Annotated[Path | None, typer.Option(help="Write step times to this JSON file.")] = None,
    nccl_memory: Annotated[
        int | None,
        typer.Option(
            "--nccl-memory-mb",
            help="Limit channels so that a communicator's ring takes no more memory than this (10^6 bytes; or 256MiB).",
            parser=megabytes,
            metavar="SIZE",
        ),
    ] = None,
    budget_percent: BudgetPercent = None,
    memory_threshold: MemoryThreshold = None,
    no_explore: NoExplore = False,
    shadow: Shadow = False,
    tune_for: TuneFor = None,
    compare: Compare = None,
    tune_environment: Annotated[
        bool,
        typer.Option(
            "--tune-environment",
            help="Try one change of NCCL's variables per start of this training, and keep proven ones.",
        ),
    ] = False,
    environment_file: Annotated[
        Path | None,
        typer.Option("--environment-file", help="With --tune-environment: try these NAME=VALUE lines only."),
    ] = None,
    chunk_sizes: Annotated[
        bool,
        typer.Option("--chunk-sizes", help="NCCL 2.30 and newer: use chunk sizes, too, that a sweep or job measured."),
    ] = False,
    numerics: Numerics = NumericsChoice.any,
    listen: Listen = None,
    fleet: Fleet = None,
    contributor: Contributor = None,
    book: BookUrl = None,
    book_key: BookKey = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="End the job without the line about what was tuned, or why nothing was.")
    ] = False,
    agent: Annotated[
        bool, typer.Option(help="--no-agent leaves the agent out: nothing is tuned.", envvar="ZEROTUNE_AGENT")
    ] = True,
) -> None:
    """Run an unmodified training command with its collectives tuned.

    Example: zerotune launch -- torchrun --nproc-per-node 8 train.py --epochs 3

    Without a GPU: zerotune launch --fabric ethernet_boxes -- torchrun --nproc-per-node 2 train.py
    """
    from ....agent import exit_watcher
    from ....agent import launch as launching
    from ....store.job_options import JobOptions
    from ....store.paths import check_endpoint
    from ....store.sqlite.file_kind import refuse_foreign
    from ...client.holders import holder_of
    from ...client.status import fetch_status, no_answer, store_text

    request = launching.LaunchRequest(
        command, fabric, endpoint, agent,
        trace_dir=log_trace, summary_path=summary, plan_path=plan, keys_dir=curve_keys,
        nccl_memory_mb=None if nccl_memory is None else nccl_memory / 1e6, name=name,
        is_quiet=quiet, is_exact=numerics is NumericsChoice.exact,
        job_options=JobOptions(shadow, tune_for or 0, compare or 0, chunk_sizes=chunk_sizes),
    )  # fmt: skip
    # As in a shell, a word with a slash is a path; others are looked up in PATH.
    if command and os.sep in command[0] and Path(command[0]).is_dir():
        raise UserError(f"command {command[0]!r} is a folder", "name the program or script in it")
    if agent and plan is None and endpoint is None:
        _ask_the_nodes_service()
    where = launching.endpoint(request)
    # At tcp:// the daemon may be on another machine.
    start_daemon = agent and plan is None and (where.startswith("ipc://") if daemon is None else daemon)
    names_store = store is not None and str(store) != os.environ.get("ZEROTUNE_STORE")
    # Only the daemon needs these: a job that starts none ignores errors in their environment variables.
    silent: UserError | None = None
    store_file = None
    try:
        store_file = store_path(store) if start_daemon or names_store else None
        if store_file is not None:
            refuse_foreign(store_file)
    except UserError as error:
        if store is not None:
            raise
        silent = error  # for example, without a home folder
    given = {
        "--no-agent": not agent and os.environ.get("ZEROTUNE_AGENT", "1") != "0",
        "--plan": plan is not None,
        "--log-trace": log_trace is not None,
        "--numerics": numerics is NumericsChoice.exact and os.environ.get("ZEROTUNE_NUMERICS") != numerics.value,
        "--daemon": daemon is True and os.environ.get("ZEROTUNE_DAEMON", "0") == "0",
        "--store": names_store,
        "--budget-percent": budget_percent is not None,
        "--memory-threshold": memory_threshold is not None,
        "--no-explore": no_explore,
        "--shadow": shadow,
        "--tune-for": tune_for is not None,
        "--compare": compare is not None,
        "--tune-environment": tune_environment,
        "--chunk-sizes": chunk_sizes,
        "--listen": listen is not None,
        "--fleet": fleet is not None,
        "--contributor": contributor is not None,
        "--book": book is not None,
        "--book-key": book_key is not None,
        "--endpoint": endpoint is not None and endpoint != os.environ.get("ZEROTUNE_ENDPOINT"),
    }  # options of the environment are meant for other commands, too
    _refuse_contradictions(given, start_daemon=start_daemon)
    if environment_file is not None and not tune_environment:
        raise UserError("--environment-file is useless without --tune-environment", "add that")
    listed = None
    if environment_file is not None:
        from ...environment.candidates import read_candidates

        listed = read_candidates(environment_file)
    trial = (budget_percent, memory_threshold, no_explore, False)
    for_daemon = given_arguments(*trial)
    # Check them now: their errors belong in this command's output, not in the daemon's log.
    bounds = brain_settings(*trial) if for_daemon else None
    shared = fleet_arguments(fleet, contributor, book, book_key)
    if start_daemon:
        if listen is not None:
            from ...service.endpoint import check_second

            check_second(listen, where, curve_keys)
        refuse_impossible(fleet, book, book_key)
    answer = None
    starts = start_daemon and store_file is not None
    if agent and plan is None:
        check_endpoint(where)
        try:
            answer = fetch_status(where, timeout_s=1.5, curve_dir=curve_keys)
        except UntrustedError as error:  # another user caused it: this one's training must run
            silent, starts = error, False
        if answer is None and silent is None and (holder := holder_of(where)) is not None:
            silent = no_answer(where, holder)
            starts = starts and not holder.is_stopped  # no other daemon can replace a stopped one
    problems = launching.check(request, daemon_answers=answer is not None or starts, silent=silent)
    launching.refuse_fatal(problems)
    if summary is not None:
        launching.check_writable(output_file(summary).parent)
    if log_trace is not None:
        launching.make_writable(log_trace)
    if given["--plan"] and given["--endpoint"]:
        print(f"zerotune: --endpoint {where} is not used: --plan uses none; leave one out", file=sys.stderr)
    for problem in problems:
        print(f"zerotune: {problem}", file=sys.stderr)
    if starts and store_file is not None:  # that is, neither --no-agent nor --plan
        from ...client.background_daemon import SlowDaemonError, ensure_daemon
        from ...client.batch_job import batch_job

        started = None
        job = batch_job()
        bound = [] if job is None else ["--end-with-pid", str(job.pid)]
        if answer is None:
            listening = [] if listen is None else ["--listen", listen]
            listening += [] if listen is None or curve_keys is None else ["--curve-keys", str(curve_keys)]
            try:
                answer, started = ensure_daemon(
                    where, store_file, idle_exit_s=IDLE_EXIT_S, options=[*for_daemon, *listening, *shared, *bound]
                )
            except SlowDaemonError as error:
                print(f"zerotune: {error}; training starts, and is tuned once it answers", file=sys.stderr)
            except UserError as error:  # for example, a full disk: training must run anyway
                print(f"zerotune: {error.problem}; training runs untuned: {error.remedy}", file=sys.stderr)
        if answer is not None and started is None:
            print(
                f"zerotune: daemon {answer.daemon_pid} is running at {where}, store {answer.store_path}",
                file=sys.stderr,
            )
        elif started is not None:
            print(
                f"zerotune: started daemon {started.pid}, store {store_file};"
                f" `zerotune status{to_be_named(where)}` shows it, it exits"
                f" {IDLE_EXIT_S / 60:.0f} minutes after the last job{'' if job is None else f' or with {job.name}'}",
                file=sys.stderr,
            )
    if answer is not None:
        for words, _ in store_text(answer):
            print(f"zerotune: {words}", file=sys.stderr)
        is_used = bounds is None or _bounds(bounds.options()) == _bounds(answer.options)
        unused = [] if is_used else for_daemon
        if given["--store"] and store_file is not None and os.path.realpath(store_file) != answer.store_path:
            unused = [*unused, "--store", str(store)]
        unused = [*unused, *_unused(answer, listen, fleet, contributor, book)]
        if unused:
            print(
                f"zerotune: {' '.join(unused)} is not used: the daemon that answers at {where} (pid"
                f" {answer.daemon_pid}) has its own; `zerotune daemon stop` ends it",
                file=sys.stderr,
            )
    if tune_environment:
        request = _with_environment(request, answer, listed)
    sys.stdout.flush()
    if agent and not quiet:
        with contextlib.suppress(OSError):  # on a full disk the job ends without its line
            request = replace(request, marks_dir=Path(tempfile.mkdtemp(prefix="zerotune-")))
            exit_watcher.begin(str(request.marks_dir))
    try:
        os.execvpe(command[0], command, launching.environment(request))
    except OSError as error:  # for example, a script without a #! line
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"command {command[0]!r} cannot be run: {reason}", "put its interpreter before it") from error


def _with_environment(request: LaunchRequest, answer: StatusReply | None, own: list[Candidate] | None) -> LaunchRequest:
    """The request with the variables that this start of the training tries, if rank 0 is on this node."""
    from msgspec import structs

    from ....store.errors import ZerotuneError
    from ...environment.proposal import propose

    try:
        if answer is None:
            raise UserError("no daemon answers that could remember it", "leave --no-daemon out")
        found = propose(Path(answer.store_path), request.command, request.name, own, request.environment)
    except (ZerotuneError, sqlite3.Error, OSError) as error:  # training must run anyway
        print(f"zerotune: --tune-environment is not used: {error}", file=sys.stderr)
        return request
    print(
        f"zerotune: the job runs with {found.variables or 'the usual environment'}: {found.why}"
        f" (`zerotune explain --environment`)",
        file=sys.stderr,
    )
    job_options = structs.replace(request.job_options, own_steps=OWN_STEPS)
    return replace(request, job_options=job_options, training=found.training, proposed_environment=found.variables)


def _bounds(options: DaemonOptions | None) -> tuple[float, ...]:
    return () if options is None else (options.budget_percent, options.memory_threshold, options.explore)


def _unused(
    answer: StatusReply, listen: str | None, fleet: str | None, contributor: str | None, book: str | None
) -> list[str]:
    """The options that the answering daemon does not follow."""
    words = ["--listen", listen] if listen is not None and not answer.listen else []
    if fleet is None and book is None:
        return words
    from ...fleet.storage import shown

    if fleet is not None and answer.fleet.url != shown(fleet):
        words += ["--fleet", shown(fleet)]
    elif contributor is not None and answer.fleet.contributor != contributor:
        words += ["--contributor", contributor]
    return [*words, "--book", shown(book)] if book is not None and answer.fleet.book != shown(book) else words


def _ask_the_nodes_service() -> None:
    """Ask the node's service to start a daemon of this user, which is the default one then."""
    from ....agent.daemon_link.node_service import request_daemon
    from ...client.background_daemon import START_TIMEOUT_S

    answer = request_daemon(wait_s=START_TIMEOUT_S)
    if answer is not None and answer.problem:
        print(f"zerotune: {answer.problem}; {answer.remedy}", file=sys.stderr)


def _refuse_contradictions(given: Mapping[str, bool], *, start_daemon: bool) -> None:
    for one, other, why in EXCLUDING:
        if given[one] and given[other]:
            raise UserError(f"{one} makes {other} useless: {why}", "leave one of them out")
    if start_daemon:
        return
    for option in OF_THE_DAEMON:
        if given[option]:
            reason = next((one for one in ("--no-agent", "--plan") if given[one]), "--no-daemon, or at tcp://")
            raise UserError(
                f"{option} is useless with {reason}: only a daemon that this command starts gets it from here",
                f"leave it out, or give {option} to `zerotune daemon`",
            )
