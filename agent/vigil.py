"""Waits beside a launched command until that ends, and says so if none of its processes could tell what was tuned.

`launch` replaces itself by the command, which so gets all signals and gives its own exit code; this process only looks
on. It is neither the command's child nor of its session.
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
from .reasons import Mark, Reason, say, untuned

LOOK_EVERY_S = 0.2
"""Where the kernel has no pidfd_open (before 5.3)."""


def begin(folder: str) -> None:
    """Have this process watched, whatever program it runs next.

    Args:
        folder: where its processes will leave their marks; removed in the end.
    """
    words = [*python_with("zerotune.agent.vigil"), str(os.getpid()), folder]
    # The shell leaves at once, so that the command has no child that it did not start.
    subprocess.run(
        ["/bin/sh", "-c", '"$@" &', "sh", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, check=False,
    )  # fmt: skip


def missing(marks: set[str]) -> Reason | None:
    """What nobody has told, by the marks that processes on this node left; None: nothing."""
    if Mark.failed.value in marks:
        return Reason.script_failed
    if Mark.agent.value not in marks:
        return Reason.no_agent
    if Mark.group.value not in marks:
        return Reason.no_group
    return Reason.cut_short if Mark.rank_0.value in marks and Mark.told.value not in marks else None


def _wait(pid: int) -> None:
    try:
        with os.fdopen(os.pidfd_open(pid)) as process:
            select.select([process], [], [])
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(LOOK_EVERY_S)


def main(pid: int, folder: str) -> None:
    """Wait, say what is missing, leave nothing behind."""
    _wait(pid)
    try:
        reason = missing(set(os.listdir(folder)))
        how = Path(folder, Mark.failed.value).read_text("utf-8") if reason is Reason.script_failed else ""
    except OSError:  # somebody has cleaned up
        return
    shutil.rmtree(folder, ignore_errors=True)
    if reason is not None:
        say(untuned(reason, how, where=" on this node"))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
