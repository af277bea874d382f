"""`zerotune top`."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any

import typer

from ....store.errors import UserError
from ..options import AsJson, CurveKeys, Endpoint, a_number, console, print_json, sigterm_like_ctrl_c
from ..paths import endpoint_or_default


def top(
    endpoint: Endpoint = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end, as into a pipe.")] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds from one look to the next.", min=0.2, callback=a_number)
    ] = 1.0,
    curve_keys: CurveKeys = None,
    as_json: AsJson = False,
) -> None:
    """Show the daemon's jobs as they run; q or Ctrl-C ends it.

    Example: zerotune top

    Once, for a script: zerotune top --once
    """
    from ...watching.watcher import Watcher

    watcher = Watcher(endpoint_or_default(endpoint), curve_keys)
    with contextlib.closing(watcher):
        if as_json or once or not sys.stdout.isatty():
            _print(watcher, as_json=as_json)
        else:
            _show(watcher, interval)


def _print(watcher: Any, *, as_json: bool) -> None:
    from ...watching.screen import screen

    snapshot = watcher.look()
    if snapshot.problem:
        raise UserError(snapshot.problem)
    if as_json:
        print_json(snapshot)
        return
    out = console()
    for line in screen(snapshot, out.width):
        out.print(line, soft_wrap=True, highlight=False)


def _show(watcher: Any, interval_s: float) -> None:
    from rich.console import Group
    from rich.live import Live

    from ...watching.keyboard import pressed
    from ...watching.screen import screen

    out = console()
    with (
        contextlib.suppress(KeyboardInterrupt),  # how it is told to end
        sigterm_like_ctrl_c(),
        pressed() as wait,
        Live(console=out, screen=True, auto_refresh=False) as live,
    ):
        while True:
            # Another line would scroll the screen; its size may have changed.
            live.update(Group(*screen(watcher.look(), out.width, out.height - 1)), refresh=True)
            if "q" in wait(interval_s).lower():
                return
