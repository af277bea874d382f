"""`zerotune status`."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ....store.errors import UserError
from ..options import AsJson, CurveKeys, Endpoint, console, print_json
from ..paths import endpoint_or_default

if TYPE_CHECKING:
    from ...offline.jobs.listing import JobLine

PATIENCE_S: Final = 8.0
"""Time for a daemon that is there, but busy, to answer."""


def status(
    endpoint: Endpoint = None,
    curve_keys: CurveKeys = None,
    all_users: Annotated[
        bool, typer.Option("--all-users", help="As root: every user's daemon, of `zerotune daemon --all-users`.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the daemon's jobs, ranks, rates, epochs, last decisions and health.

    Example: zerotune status
    """
    from ...client.holders import holder_of
    from ...client.status import fetch_status, no_answer

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
        print(f"user {uid}:")  # all that follows is what that user's daemon says
        try:
            render_status(reply, console())
        except Exception as error:  # one user must not hide the daemons of others
            print(f"what their daemon says cannot be shown: {error}")
    if not replies:
        print("no user's daemon runs")


def _last_job(store: Path) -> JobLine | None:
    """The newest job that is over, where the daemon's store can be read here."""
    from ...offline.jobs.listing import list_jobs

    try:
        lines = list_jobs(store, limit=1, only_over=True) if store.exists() else []
        return lines[0] if lines else None
    except (UserError, sqlite3.Error):
        return None  # what is wrong with its store the daemon says itself
