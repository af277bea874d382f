"""Finds the living process that holds one of our locks: of a daemon's address, or of a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import psutil

from ...store.errors import UntrustedError
from ...store.lockfile import named_holder
from ...store.private_folders import open_socket_folder


class Holder(NamedTuple):
    """The process that holds a lock."""

    pid: int
    is_stopped: bool


def holder_of(endpoint: str) -> Holder | None:
    """The daemon that has `endpoint`, whether it answers or not; None if there is none.

    It is always None for daemons at `tcp://`, as their lock files may be on another machine. It is also None if other
    users could have written the lock file.
    """
    scheme, _, place = endpoint.partition("://")
    if scheme != "ipc":
        return None
    try:
        os.close(open_socket_folder(Path(place).parent))
    except (OSError, UntrustedError):
        return None
    return living_holder(Path(place + ".lock"))


def living_holder(lock: Path) -> Holder | None:
    """The process in a lock file, if it lives; the lock itself is not touched."""
    if (named := named_holder(lock)) is None:
        return None
    try:
        process = psutil.Process(named[0])
        if process.create_time() > lock.stat().st_mtime + 1.0:
            return None  # another process has the pid by now
        status = process.status()
        # A killed daemon stays a zombie while the job that started it runs.
        return None if status == psutil.STATUS_ZOMBIE else Holder(process.pid, status == psutil.STATUS_STOPPED)
    except (psutil.Error, OSError):
        return None
