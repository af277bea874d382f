"""The output of `zerotune` without a command: the next useful commands on this machine."""

from __future__ import annotations

import os
from typing import Final

from ...store.paths import default_endpoint, default_store_path
from ..client.holders import holder_of

DEMO: Final = ("zerotune demo", "see the whole loop work, without a GPU")
DOCTOR: Final = ("zerotune doctor", "check this machine")
LAUNCH: Final = ("zerotune launch -- COMMAND", "train, tuned: COMMAND stays as it is")
STATUS: Final = ("zerotune status", "what the daemon is doing")
JOBS: Final = ("zerotune jobs", "what each job gained")
EXPLAIN: Final = ("zerotune explain", "why each setting is what it is")


def next_commands(*, has_daemon: bool, has_store: bool) -> tuple[tuple[str, str], ...]:
    """Three useful next commands, each with its purpose."""
    if has_daemon:
        return (LAUNCH, STATUS, JOBS if has_store else DOCTOR)
    return (LAUNCH, JOBS, EXPLAIN) if has_store else (DEMO, DOCTOR, LAUNCH)


def print_greeting() -> None:
    """Print the greeting and the three commands."""
    has_daemon = holder_of(default_endpoint()) is not None
    has_store = os.path.exists(default_store_path())
    there = "a daemon runs here" if has_daemon else "no daemon runs here"
    print(f"zerotune tunes NCCL's collectives while you train; {there}. Next:\n")
    commands = next_commands(has_daemon=has_daemon, has_store=has_store)
    width = max(len(command) for command, _ in commands)
    for command, purpose in commands:
        print(f"  {command:<{width}}  {purpose}")
    print("\n`zerotune --help` lists all commands.")
