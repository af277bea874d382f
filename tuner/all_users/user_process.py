"""A user's process, started by root, which never waits for it.

A user may stop or kill their process at any moment, even before the program runs in it; `subprocess.Popen` would wait
for that. So the process is forked here and watched through its process id and its output, without waiting.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from .folders import User

CANNOT_RUN: Final = 126
"""Exit code of a process that cannot run the command."""
_READ_BYTES: Final = 65_536
_MAX_FILES: Final = 2**31 - 1


class UserProcess:
    """Starts at construction, in a session of its own, in `/`. It inherits only the descriptors in the arguments.

    Raises OSError if no process can be started.

    Args:
        log: the user's file for its standard error, truncated as that user; None: it has none.
    """

    def __init__(
        self,
        user: User,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        output: int | None = None,
        keep: int | None = None,
        log: Path | None = None,
    ) -> None:
        self.code: int | None = None
        """Its exit code once it is known to have ended, negative for a signal."""
        self.pid = os.fork()
        if self.pid == 0:
            _become(user, command, environment, output, keep, log)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended; this never waits, and reaps a zombie."""
        if self.code is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _become(
    user: User,
    command: Sequence[str],
    environment: Mapping[str, str],
    output: int | None,
    keep: int | None,
    log: Path | None,
) -> None:
    """Run the command in place of this process, a child that was just forked; never returns."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard, source in ((0, nothing), (1, nothing if output is None else output), (2, nothing)):
            os.dup2(source, standard)
        # A user who may signal a process may take its descriptors, even those that root was started with.
        kept = 2 if keep is None else keep
        os.set_inheritable(kept, True)
        os.closerange(3, kept)
        os.closerange(kept + 1, _MAX_FILES)
        os.chdir("/")
        os.umask(0o077)
        os.setgroups(user.groups)
        os.setgid(user.gid)
        os.setuid(user.uid)  # from here on the user may stop it
        if log is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
            with contextlib.suppress(OSError):  # for example, the disk is full
                os.dup2(os.open(log, flags, 0o600), 2)
        try:
            os.execve(command[0], list(command), environment)
        except OSError as error:
            os.write(2, f"zerotune: user {user.uid} cannot run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_RUN)


class _ReadProcess:
    """A user's process whose output is read until `ends_at_s`; starts at construction.

    Raises OSError if no process can be started.
    """

    def __init__(self, user: User, command: Sequence[str], environment: Mapping[str, str], ends_at_s: float) -> None:
        self.user, self.ends_at_s, self.text = user, ends_at_s, bytearray()
        self._reading, writing = os.pipe()
        try:
            self._process = UserProcess(user, command, environment, output=writing)
        except OSError:
            os.close(self._reading)
            raise
        finally:
            os.close(writing)

    def fileno(self) -> int:
        """A descriptor; it is readable once there is output, or output has ended."""
        return self._reading

    def end(self) -> None:
        """Stop reading."""
        os.close(self._reading)
        self._process.signal(signal.SIGKILL)


def outputs_of(
    commands: Mapping[User, Sequence[str]],
    environment: Mapping[str, str],
    timeout_s: float,
    max_bytes: int,
    at_once: int,
) -> dict[User, bytes]:
    """Outputs of the users' commands that end by themselves, without those that print too much or take too long.

    Each command has its own time limit, so no user's command delays or shortens another's. Raises OSError if no process
    can be started.
    """
    outputs: dict[User, bytes] = {}
    waiting: list[tuple[User, Sequence[str]]] = list(commands.items())[::-1]
    running: set[_ReadProcess] = set()
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    user, command = waiting.pop()
                    running.add(one := _ReadProcess(user, command, environment, time.monotonic() + timeout_s))
                    selector.register(one, selectors.EVENT_READ)
                left_s = min(one.ends_at_s for one in running) - time.monotonic()
                readable = {key.fileobj for key, _ in selector.select(max(0.0, left_s))}
                for one in list(running):
                    part = os.read(one.fileno(), _READ_BYTES) if one in readable else None
                    one.text += part or b""
                    if part == b"":
                        outputs[one.user] = bytes(one.text)
                    if part == b"" or len(one.text) > max_bytes or time.monotonic() >= one.ends_at_s:
                        selector.unregister(one)
                        running.remove(one)
                        one.end()
        finally:
            for one in running:
                one.end()
    return outputs
