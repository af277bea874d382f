"""Waits until a launched command ends, and prints why nothing was tuned if none of its processes could print it.

`launch` replaces itself by the command, so that the command gets all signals and returns its own exit code. This
process only watches. It is neither a child of the command nor in its session.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

from ..store.foreign.own_python import python_with
from .reasons import Mark, Reason, print_line, untuned

POLL_S = 0.2
"""Poll interval on kernels without pidfd_open (before 5.3)."""
GRACE_S = 2.0
"""Processes that are killed together do not end at the same moment."""


def begin(folder: str) -> None:
    """Have this process watched, whatever program it executes next.

    `folder` is for the marks of its processes; it is removed in the end.
    """
    words = [*python_with("zerotune.agent.exit_watcher"), str(os.getpid()), folder]
    # The shell exits at once, so that the command has no child that it did not start.
    subprocess.run(
        ["/bin/sh", "-c", '"$@" &', "sh", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, check=False,
    )  # fmt: skip


def missing(marks: set[str]) -> Reason | None:
    """The reason that no process has printed, according to the marks on this node; None: nothing is missing."""
    if Mark.failed.value in marks:
        return Reason.script_failed
    if Mark.agent.value not in marks:
        return Reason.no_agent
    if Mark.group.value not in marks:
        return Reason.no_group
    return Reason.cut_short if Mark.rank_0.value in marks and Mark.reported.value not in marks else None


def _left_running(folder: Path) -> str:
    """The number of rank 0's process, if it runs on; empty if not."""
    deadline_s = time.monotonic() + GRACE_S
    while (pid := _running(folder)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return pid


def _running(folder: Path) -> str:
    try:
        pid = (folder / Mark.rank_0.value).read_text("utf-8")
        status = Path("/proc", pid, "stat").read_bytes() if pid.isdigit() else b""
    except OSError:
        return ""
    return pid if status and status.rpartition(b")")[2].split()[0] != b"Z" else ""


def _wait(pid: int) -> None:
    try:
        with os.fdopen(os.pidfd_open(pid)) as process:
            select.select([process], [], [])
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(POLL_S)


def main(pid: int, folder: str) -> None:
    """Wait for `pid`, print the missing reason, remove `folder`."""
    _wait(pid)
    try:
        reason = missing(set(os.listdir(folder)))
        how = Path(folder, Mark.failed.value).read_text("utf-8") if reason is Reason.script_failed else ""
        if reason is Reason.cut_short and (running := _left_running(Path(folder))):
            reason, how = Reason.left_running, running
    except OSError:  # the folder was removed
        return
    shutil.rmtree(folder, ignore_errors=True)
    if reason is not None:
        print_line(untuned(reason, how, where=" on this node"))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
