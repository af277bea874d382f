"""A user's daemon, as a process of that user."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from zerotune.store.errors import UserError
from zerotune.tuner.all_users.folders import Folders, User

SAFE_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE")
"""What a user's daemon gets of the service's environment, which may hold secrets."""


class UserDaemon:
    """Starts at construction.

    `ready_fd` can be read once the daemon serves (one byte), or has ended before (nothing).

    Args:
        user: whom it runs as.
        folders: theirs.
        options: further arguments of `zerotune daemon`.

    Raises:
        UserError: this user may not run our Python.
    """

    def __init__(self, user: User, folders: Folders, options: Sequence[str]) -> None:
        self.user = user
        self.folders = folders
        self.ready_fd, told = os.pipe()
        command = [sys.executable, "-I", "-m", "zerotune.tuner.cli", "daemon", "--ready-fd", str(told)]
        command += ["--endpoint", folders.endpoint, "--store", str(folders.state / "store.db")]
        if folders.pool is not None:
            command += ["--knowledge-pool", str(folders.pool)]
        try:
            self._process = subprocess.Popen(
                [*command, *options], stdin=subprocess.DEVNULL, pass_fds=(told,), cwd="/", start_new_session=True,
                user=user.uid, group=user.gid, extra_groups=user.groups, umask=0o077,
                env={name: value for name in SAFE_ENVIRONMENT if (value := os.environ.get(name)) is not None},
            )  # fmt: skip
        except OSError as error:
            os.close(self.ready_fd)
            raise UserError(
                f"user {user.uid} cannot run {sys.executable}: {error.strerror}",
                "install zerotune where all users may read it",
            ) from error
        finally:
            os.close(told)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more; a zombie is none from then on."""
        return self._process.poll() is not None

    def is_ready(self) -> bool:
        """Whether it serves; to be asked once, when `ready_fd` can be read."""
        return bool(os.read(self.ready_fd, 1))

    def end(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def reap(self, timeout_s: float) -> None:
        """Wait for its end, and kill it where that does not come."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
