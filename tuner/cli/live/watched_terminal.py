"""`zerotune status --watch`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from ....store.errors import UserError
from ..options import console, print_json, sigterm_like_ctrl_c


def show(endpoint: str, curve_keys: Path | None, interval_s: float, *, once: bool, as_json: bool) -> None:
    """Show a daemon's jobs until q or Ctrl-C; print them once into a pipe.

    Raises UserError if they should be printed once, and no daemon answers.
    """
    from ...watching.watcher import Watcher

    with contextlib.closing(Watcher(endpoint, curve_keys)) as watcher:
        if as_json or once or not sys.stdout.isatty():
            _print(watcher, as_json=as_json)
        else:
            _show(watcher, interval_s)


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
        contextlib.suppress(KeyboardInterrupt),  # Ctrl-C ends it
        sigterm_like_ctrl_c(),
        pressed() as wait,
        Live(console=out, screen=True, auto_refresh=False) as live,
    ):
        while True:
            # One more line would scroll the screen. Its size may have changed.
            live.update(Group(*screen(watcher.look(), out.width, out.height - 1)), refresh=True)
            if "q" in wait(interval_s).lower():
                return
