"""`zerotune status`: once, live in the terminal, or as a page."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ....store.errors import UserError
from ..options import AsJson, CurveKeys, Endpoint, a_number, console, print_json
from ..paths import endpoint_or_default

if TYPE_CHECKING:
    from ...offline.jobs.listing import JobLine

LISTEN: Final = "127.0.0.1:8470"
PATIENCE_S: Final = 8.0
"""Time for a busy daemon to answer."""


def status(
    endpoint: Endpoint = None,
    curve_keys: CurveKeys = None,
    all_users: Annotated[
        bool, typer.Option("--all-users", help="As root: show all users' daemons of `zerotune daemon --all-users`.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the jobs as they run; q or Ctrl-C ends it.")] = False,
    once: Annotated[bool, typer.Option("--once", help="With --watch: print once and end, as into a pipe.")] = False,
    interval: Annotated[
        float, typer.Option(help="With --watch: seconds between two looks.", min=0.2, callback=a_number)
    ] = 1.0,
    web: Annotated[bool, typer.Option("--web", help="Serve a live, read-only page of the jobs until Ctrl-C.")] = False,
    listen: Annotated[
        str, typer.Option(help="With --web: serve at this address; port 0 is a free one.", metavar="HOST:PORT")
    ] = LISTEN,
    token: Annotated[
        bool,
        typer.Option(help="With --web: the printed address has a secret; --no-token: none, for this machine only."),
    ] = True,
    host_name: Annotated[
        list[str] | None,
        typer.Option(help="With --web: a further host name that browsers may use; repeat it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the daemon's jobs: ranks, rates, last decisions, gains, health.

    Example: zerotune status

    As they run: zerotune status --watch

    In a browser: zerotune status --web
    """
    from ...client.holders import holder_of
    from ...client.status import fetch_status, no_answer

    default_listen = listen == LISTEN and token and not host_name
    if not web and not default_listen:
        raise UserError("--listen, --no-token and --host-name are useless without --web", "add --web")
    if once and not watch:
        raise UserError("--once is useless without --watch", "add --watch, or leave it out")
    if watch and web:
        raise UserError("--watch is for the terminal, --web for a browser", "give one of them")
    if web:
        from .watched_page import serve_page

        serve_page(endpoint_or_default(endpoint), curve_keys, listen, token, host_name or ())
        return
    if watch:
        from .watched_terminal import show

        show(endpoint_or_default(endpoint), curve_keys, interval, once=once, as_json=as_json)
        return
    if all_users:
        _show_all(as_json)
        return
    where = endpoint_or_default(endpoint)
    reply = fetch_status(where, timeout_s=2.0, curve_dir=curve_keys)
    if reply is None:
        holder = holder_of(where)
        if holder is not None and not holder.is_stopped:
            reply = fetch_status(where, timeout_s=PATIENCE_S, curve_dir=curve_keys)
        if reply is None:
            raise no_answer(where, holder)
    last = None if reply.jobs else _last_job(Path(reply.store_path))
    if as_json:
        import msgspec

        print_json({**msgspec.to_builtins(reply), "last_job": last})
        return
    from ...client.status import render_status

    render_status(reply, console())
    if last is not None:
        from ...offline.jobs.listing_shown import last_job_in_words

        console().print(last_job_in_words(last), markup=False, highlight=False, soft_wrap=True)


def _show_all(as_json: bool) -> None:
    import msgspec

    from ...client.status import render_status
    from .all_users import all_status

    replies = list(all_status())
    if as_json:
        print_json([{"uid": uid, **msgspec.to_builtins(reply)} for uid, reply in replies])
        return
    for uid, reply in replies:
        print(f"user {uid}:")  # that user's daemon is the source of the lines below
        try:
            render_status(reply, console())
        except Exception as error:  # one user must not hide the daemons of others
            print(f"what their daemon says cannot be shown: {error}")
    if not replies:
        print("no user's daemon runs")


def _last_job(store: Path) -> JobLine | None:
    """The newest job that has ended, if the daemon's store can be read here."""
    from ...offline.jobs.listing import list_jobs

    try:
        lines = list_jobs(store, limit=1, only_over=True) if store.exists() else []
        return lines[0] if lines else None
    except (UserError, sqlite3.Error):
        return None  # the daemon itself reports problems of its store
