"""A user's daemon, as a process of that user."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .folders import Folders, User
from .user_process import UserProcess

SAFE_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE")
"""Variables of the service's environment that a user's daemon gets; others may have secrets."""


class UserDaemon(UserProcess):
    """Starts at construction; OSError if no process can be started.

    `ready_fd` is readable once the daemon serves (one byte), or has ended before that (no byte).
    """

    def __init__(self, user: User, folders: Folders, options: Sequence[str]) -> None:
        self.user = user
        self.folders = folders
        self.ready_fd, writing_fd = os.pipe()
        os.set_blocking(self.ready_fd, False)
        command = [sys.executable, "-I", "-m", "zerotune.tuner.cli", "daemon", "--ready-fd", str(writing_fd)]
        command += ["--endpoint", folders.endpoint, "--store", str(folders.state / "store.db")]
        if folders.pool is not None:
            command += ["--knowledge-pool", str(folders.pool)]
        environment = {name: value for name in SAFE_ENVIRONMENT if (value := os.environ.get(name)) is not None}
        try:
            super().__init__(user, [*command, *options], environment, keep=writing_fd, log=folders.log)
        except OSError:
            os.close(self.ready_fd)
            raise
        finally:
            os.close(writing_fd)

    def is_ready(self) -> bool:
        """Whether it serves; call it once, when `ready_fd` is readable; it closes the descriptor."""
        try:
            return bool(os.read(self.ready_fd, 1))
        except BlockingIOError:
            return False
        finally:
            os.close(self.ready_fd)
