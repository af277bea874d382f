"""Why a launched job was not tuned, in words that docs/operate/errors.md explains; and marks of how far it came."""

from __future__ import annotations

import contextlib
import os
import sys
from enum import Enum
from pathlib import Path

MARKS = "ZEROTUNE_MARKS"
"""Folder on the launching node in which processes leave marks (`Mark`)."""
QUIET = "ZEROTUNE_QUIET"
"""1: a job ends without its line."""


class Reason(Enum):
    """The name is the code at the end of the line; the value is a template for the text."""

    script_failed = "the script itself failed: {detail}"
    no_agent = "no process had the agent, or the job ended at once; run `zerotune doctor` where it trains"
    no_group = "no process with the agent made a process group"
    cut_short = "rank 0 was killed before it could say what was tuned; `zerotune explain` has what is known"
    left_running = "the launched command ended, and rank 0 (pid {detail}) still runs; end it if nothing else will"
    one_rank = "the job has one rank, and so no collectives"
    not_nccl = "the job's process groups ({detail}) do not run on NCCL"
    no_plugin = "the plugin for NCCL cannot be had here; `zerotune doctor` says why"
    not_loaded = "NCCL ran collectives and did not load the plugin; `zerotune doctor` says what may be wrong"
    no_collectives = "NCCL was asked for no collective"
    no_row = "no row of the plan applied to any of {detail}"
    no_daemon = "no daemon answered at {detail}; `zerotune doctor` says what keeps one from it"
    no_steps = "no training step was seen to end; let all ranks call `zerotune.step_ended()` where one does"
    frozen = "settings stay as NCCL chooses: {detail}"
    captured = "{detail} of the calls were replays of captured graphs, which keep the settings they were captured with"
    no_repetition = "the job ended after {detail}, too few to learn from"
    silent_daemon = "the daemon at {detail} was silent at the end, and tuning had paused"
    in_shadow = "the job ran in shadow (--shadow), where nothing is changed: {detail}"
    nothing_better = "nothing better than NCCL's own choice had been proven for {detail}"


class Mark(Enum):
    """How far a process of a launched job came: the name of a file that it created."""

    agent = "agent"
    group = "group"
    rank_0 = "rank_0"
    reported = "reported"
    """Rank 0 has printed the line."""
    failed = "failed"
    """Its content says how the first script that failed did so."""


def write_mark(mark: Mark, words: str = "") -> bool:
    """Create a mark with `words` for `zerotune.agent.exit_watcher`, unless it exists; returns whether it exists now.

    Never raises: on another node there is no such folder.
    """
    if not (folder := os.environ.get(MARKS)):
        return False
    path = Path(folder, mark.value)
    with contextlib.suppress(OSError), path.open("x", encoding="utf-8") as file:
        file.write(words)
    return path.exists()


def remove_mark(mark: Mark) -> None:
    """Remove a mark that no longer holds. Never raises."""
    if folder := os.environ.get(MARKS):
        with contextlib.suppress(OSError):
            Path(folder, mark.value).unlink(missing_ok=True)


def untuned(reason: Reason, detail: str = "", where: str = "") -> str:
    """The line of a job in which nothing was tuned, such as "zerotune: nothing was tuned on this node: ...".

    `where` is the part of the job that the line speaks of, if it is not the whole job.
    """
    is_tuned_perhaps = reason in (Reason.script_failed, Reason.cut_short, Reason.left_running)
    prefix = "" if is_tuned_perhaps else f"nothing was tuned{where}: "
    return f"zerotune: {prefix}{reason.value.format(detail=detail)} ({reason.name})"


def print_line(line: str) -> None:
    """Print it on stderr, however the script has configured logging. Never raises."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed or None
        print(line, file=sys.stderr, flush=True)
