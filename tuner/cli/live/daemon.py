"""`zerotune daemon` and its subcommands: stop, keys, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...all_users.folders import Share
from ..fleet_options import BookKey, BookUrl, Contributor, Fleet, Listen, fleet_arguments, fleet_writer, shelf_of
from ..grouped import Grouped
from ..options import CurveKeys, Endpoint, StorePath, a_number
from ..paths import endpoint_or_default, store_path, to_be_named
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
from .all_users import IDLE_EXIT_S, refuse_useless, serve
from .keys import keys
from .metrics import metrics as metrics_command
from .stop import stop

daemon = typer.Typer(cls=Grouped, invoke_without_command=True)
daemon.command()(stop)
daemon.command()(keys)
daemon.command("metrics")(metrics_command)


@daemon.callback()
def run(
    context: typer.Context,
    endpoint: Endpoint = None,
    store: StorePath = None,
    listen: Listen = None,
    idle_exit: Annotated[
        float | None,
        typer.Option(help="End after this many seconds without a rank; default: never.", min=0.01, callback=a_number),
    ] = None,
    curve_keys: CurveKeys = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="Serve Prometheus metrics there, in a process of their own.", metavar="HOST:PORT"),
    ] = None,
    retention_days: Annotated[
        int, typer.Option(help="Keep this many of the newest days with measurements.", min=1)
    ] = 365,
    retention_rows: Annotated[
        int, typer.Option(help="Keep this many of the newest measurements of each fabric.", min=1000)
    ] = 1_000_000,
    budget_percent: BudgetPercent = None,
    memory_threshold: MemoryThreshold = None,
    no_explore: NoExplore = False,
    shadow: Shadow = False,
    tune_for: TuneFor = None,
    compare: Compare = None,
    numerics: Numerics = NumericsChoice.any,
    knowledge_pool: Annotated[
        Path | None,
        typer.Option(help="Folder in which users share measurements; each needs a folder in it, named by uid."),
    ] = None,
    all_users: Annotated[
        bool, typer.Option("--all-users", help="As root: start a daemon for each user who trains, as that user.")
    ] = False,
    socket_group: Annotated[
        str | None, typer.Option(help="With --all-users: only members of this group; default: all users.")
    ] = None,
    share: Annotated[
        Share | None,
        typer.Option(help="With --all-users: who else may use a user's measurements; default: private."),
    ] = None,
    ready_fd: Annotated[
        int | None, typer.Option(help="Write a line to this file descriptor, and close it, once the daemon answers.")
    ] = None,
    fleet: Fleet = None,
    contributor: Contributor = None,
    end_with_pid: Annotated[int | None, typer.Option(help="End once this process has ended.")] = None,
    book: BookUrl = None,
    book_key: BookKey = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each decision.")] = False,
) -> None:
    """Run the tuner daemon of this node in the foreground; SIGTERM ends it cleanly.

    Example: zerotune daemon --store /var/lib/zerotune/store.db

    On each of several nodes: zerotune daemon --listen tcp://*:5577 --curve-keys keys

    For all users of a node: zerotune daemon --all-users --share node
    """
    if context.invoked_subcommand is not None:
        return
    import contextlib
    import logging
    import os
    import sys

    from ....store.errors import printable
    from ....store.parent_process import end_with_parent
    from ....store.sqlite.database import Retention
    from ...service.readiness import end_with, report_ready
    from ...service.serving import run_daemon

    if ready_fd is not None:
        end_with_parent()

    class OneLine(logging.Formatter):
        """Keeps each message on one line, as names in it come from others."""

        def formatMessage(self, record: logging.LogRecord) -> str:
            record.message = printable(record.message)
            return super().formatMessage(record)

    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
    shared = fleet_arguments(fleet, contributor, book, book_key)
    if all_users:
        named = {"--store": store, "--endpoint": endpoint}
        variables = {"--store": "ZEROTUNE_STORE", "--endpoint": "ZEROTUNE_ENDPOINT"}  # meant for other commands, too
        typed = {name: value for name, value in named.items() if str(value) != os.environ.get(variables[name])}
        refuse_useless({"--metrics": metrics, "--knowledge-pool": knowledge_pool, **typed})
        options = [
            *given_arguments(budget_percent, memory_threshold, no_explore, shadow, numerics, tune_for, compare),
            *("--retention-days", str(retention_days), "--retention-rows", str(retention_rows)),
            *("--idle-exit", str(IDLE_EXIT_S if idle_exit is None else idle_exit)),
            *shared,
            *(["--verbose"] if verbose else []),
        ]
        # Their errors belong in this command's output.
        brain_settings(budget_percent, memory_threshold, no_explore, shadow, numerics, tune_for, compare)
        serve(socket_group, share or Share.private, options, listen, curve_keys)
        return
    refuse_useless({"--socket-group": socket_group, "--share": share}, without="--all-users")
    where, path = endpoint_or_default(endpoint), store_path(store)
    settings = brain_settings(budget_percent, memory_threshold, no_explore, shadow, numerics, tune_for, compare)

    def announce(opened: Path, addresses: list[str]) -> None:
        report_ready(ready_fd)
        if end_with_pid is not None:
            end_with(end_with_pid)
        there = to_be_named(where)
        print(
            f"zerotune: daemon {os.getpid()} listens at {' and '.join(addresses)}{metrics_at}, store {opened};"
            f" train with `zerotune launch{there} -- COMMAND`, look with `zerotune status{there}`,"
            f" end it with `zerotune daemon stop{there}`",
            file=sys.stderr,
            flush=True,
        )

    shelf, writer = shelf_of(book, book_key, path), fleet_writer(fleet, contributor, path)
    retention = Retention(max_rows_per_fabric=retention_rows, max_days=retention_days)
    metrics_at = ""
    with contextlib.ExitStack() as stack:
        if metrics is not None:
            from ...metrics.child import metrics_process

            metrics_at = f", metrics at {stack.enter_context(metrics_process(metrics, where, path, curve_keys))}"
        code = run_daemon(
            where, path, listen=listen, idle_exit_s=idle_exit, curve_dir=curve_keys, retention=retention,
            settings=settings, knowledge_pool=knowledge_pool, fleet=writer, shelf=shelf,
            on_ready=announce,
        )  # fmt: skip
    raise typer.Exit(code)
