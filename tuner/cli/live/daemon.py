"""`zerotune daemon`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerotune.store.errors import UserError
from zerotune.tuner.all_users.folders import Share
from zerotune.tuner.cli.live.all_users import IDLE_EXIT_S, refuse_useless, serve
from zerotune.tuner.cli.options import CurveKeys, Endpoint, StorePath, a_number
from zerotune.tuner.cli.paths import endpoint_or_default, store_path
from zerotune.tuner.cli.trial_options import (
    BudgetPercent,
    MemoryThreshold,
    NoExplore,
    Shadow,
    brain_settings,
    given_arguments,
)

if TYPE_CHECKING:
    from zerotune.tuner.fleet.shelf import Shelf
    from zerotune.tuner.fleet.writer import FleetWriter


def daemon(
    endpoint: Endpoint = None,
    store: StorePath = None,
    listen: Annotated[
        str | None,
        typer.Option(help="Also listen at tcp://HOST:PORT for the daemons of a job's other nodes (* is any host)."),
    ] = None,
    idle_exit: Annotated[
        float | None,
        typer.Option(help="Leave after this many seconds without a rank; default: never.", min=0.01, callback=a_number),
    ] = None,
    curve_keys: CurveKeys = None,
    metrics: Annotated[
        str | None, typer.Option(help="Serve Prometheus metrics at HOST:PORT, from a process of their own.")
    ] = None,
    retention_days: Annotated[
        int, typer.Option(help="Days on which anything was measured that are kept, the newest.", min=1)
    ] = 365,
    retention_rows: Annotated[
        int, typer.Option(help="Measurements kept of each fabric, the newest.", min=1000)
    ] = 1_000_000,
    budget_percent: BudgetPercent = None,
    memory_threshold: MemoryThreshold = None,
    no_explore: NoExplore = False,
    shadow: Shadow = False,
    knowledge_pool: Annotated[
        Path | None,
        typer.Option(help="Folder in which users share what they measured; each needs a folder in it, named by uid."),
    ] = None,
    all_users: Annotated[
        bool, typer.Option("--all-users", help="As root: start a daemon for each user who trains, as that user.")
    ] = False,
    socket_group: Annotated[
        str | None, typer.Option(help="With --all-users: only members of this group; default: all users.")
    ] = None,
    share: Annotated[
        Share | None,
        typer.Option(help="With --all-users: who else learns what a user's jobs measured; default: private."),
    ] = None,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    fleet: Annotated[
        str | None,
        typer.Option(help="Write what is measured below this URL for other nodes: a directory, s3://BUCKET/PREFIX ..."),
    ] = None,
    end_with_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
    book: Annotated[
        str | None, typer.Option(help="Book of what other nodes learned, file or URL: it says what is tried first.")
    ] = None,
    book_key: Annotated[
        str | None,
        typer.Option("--book-key", help="Public key that must have signed it: a .pub file, or 64 hexadecimal digits."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each decision.")] = False,
) -> None:
    """Run the tuner daemon of this node in the foreground; SIGTERM ends it in good order.

    Example: zerotune daemon --store /var/lib/zerotune/store.db

    On each of several nodes: zerotune daemon --listen tcp://*:5577 --curve-keys keys

    For all users of a node: zerotune daemon --all-users --share node
    """
    import contextlib
    import logging
    import os
    import sys

    from zerotune.store.parent_process import end_with_parent
    from zerotune.store.paths import default_endpoint
    from zerotune.store.sqlite.database import Retention
    from zerotune.tuner.service.daemon import run_daemon
    from zerotune.tuner.service.endpoint import temporary_folder_note
    from zerotune.tuner.service.readiness import end_with, tell_ready

    if ready_fd is not None:
        end_with_parent()

    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    if all_users:
        refuse_useless({"--metrics": metrics, "--knowledge-pool": knowledge_pool})
        options = [
            *given_arguments(budget_percent, memory_threshold, no_explore, shadow),
            *("--retention-days", str(retention_days), "--retention-rows", str(retention_rows)),
            *("--idle-exit", str(IDLE_EXIT_S if idle_exit is None else idle_exit)),
            *(["--fleet", fleet] if fleet is not None else []),
            *(["--book", book] if book is not None else []),
            *(["--book-key", book_key] if book_key is not None else []),
            *(["--verbose"] if verbose else []),
        ]
        brain_settings(budget_percent, memory_threshold, no_explore, shadow)  # what is wrong with them belongs here
        serve(socket_group, share or Share.private, options, listen, curve_keys)
        return
    refuse_useless({"--socket-group": socket_group, "--share": share}, without="--all-users")
    where, path = endpoint_or_default(endpoint), store_path(store)
    settings = brain_settings(budget_percent, memory_threshold, no_explore, shadow)

    def announce(opened: Path, addresses: list[str]) -> None:
        tell_ready(ready_fd)
        if end_with_pid is not None:
            end_with(end_with_pid)
        note = temporary_folder_note()
        if note and where == default_endpoint():
            print(f"zerotune: {note}", file=sys.stderr)
        there = "" if where == default_endpoint() else f" --endpoint {where}"
        print(
            f"zerotune: daemon {os.getpid()} listens at {' and '.join(addresses)}{metrics_at}, store {opened};"
            f" train with `zerotune launch{there} -- COMMAND`, look with `zerotune status{there}`,"
            " end it with Ctrl-C or SIGTERM",
            file=sys.stderr,
            flush=True,
        )

    shelf, writer = _shelf(book, book_key), _fleet_writer(fleet)
    retention = Retention(max_rows_per_fabric=retention_rows, max_days=retention_days)
    metrics_at = ""
    with contextlib.ExitStack() as stack:
        if metrics is not None:
            from zerotune.tuner.metrics.child import metrics_process

            metrics_at = f", metrics at {stack.enter_context(metrics_process(metrics, where, path, curve_keys))}"
        code = run_daemon(
            where, path, listen=listen, idle_exit_s=idle_exit, curve_dir=curve_keys, retention=retention,
            settings=settings, knowledge_pool=knowledge_pool, fleet=writer, shelf=shelf,
            on_ready=announce,
        )  # fmt: skip
    raise typer.Exit(code)


def _shelf(url: str | None, key: str | None) -> Shelf | None:
    if url is None and key is None:
        return None
    if url is None or key is None:
        raise UserError("a book is believed by its signature only", "give both --book and --book-key")
    from zerotune.tuner.fleet import check_installed

    check_installed("--book")
    from zerotune.tuner.fleet.shelf import Shelf
    from zerotune.tuner.fleet.signing import Verifier
    from zerotune.tuner.fleet.storage import Storage

    Storage(url)
    return Shelf(url, Verifier.of(key))


def _fleet_writer(url: str | None) -> FleetWriter | None:
    if url is None:
        return None
    import socket

    from zerotune.tuner.fleet import check_installed

    check_installed("--fleet")
    from zerotune.tuner.fleet.storage import Storage
    from zerotune.tuner.fleet.writer import FleetWriter

    return FleetWriter(Storage(url, writes=True), socket.gethostname())
