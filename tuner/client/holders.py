"""Which living process holds a lock of ours: a daemon's address, a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import psutil

from ...store.errors import UntrustedError
from ...store.lockfile import named_holder
from ...store.private_folders import open_socket_folder


class Holder(NamedTuple):
    """The process that has a daemon's address."""

    pid: int
    is_stopped: bool


def holder_of(endpoint: str) -> Holder | None:
    """Which daemon has `endpoint`, whether it answers or not; None where there is none.

    For daemons at `tcp://` always None: their lock files are not on this machine. None, too, where others could have
    written the lock file.
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
    """The process that a lock file names, if it lives; the lock itself is not touched."""
    if (named := named_holder(lock)) is None:
        return None
    try:
        process = psutil.Process(named[0])
        if process.create_time() > lock.stat().st_mtime + 1.0:
            return None  # another one has the number by now
        status = process.status()
        # One that was killed stays a zombie for as long as the job that started it trains.
        return None if status == psutil.STATUS_ZOMBIE else Holder(process.pid, status == psutil.STATUS_STOPPED)
    except (psutil.Error, OSError):
        return None
