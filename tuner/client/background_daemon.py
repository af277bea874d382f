"""A daemon in the background, for `launch --daemon` and the demo."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ...agent.daemon_link.connection import listener_pid
from ...store import wire
from ...store.errors import UserError
from ...store.foreign.own_python import python_with
from ...store.private_folders import make_private, refuse_open_folder
from .holders import holder_of
from .status import fetch_status

START_TIMEOUT_S = 30.0
LOG_ROOM_BYTES = 4096
"""Space that the log needs: a page, more than a failing daemon's last lines."""
_ELSEWHERE = "give another place with --store or ZEROTUNE_STORE"


class SlowDaemonError(UserError):
    """A daemon runs and does not answer yet, for example if Python is on a slow network drive."""

    def __init__(self, endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
        super().__init__(f"the daemon at {endpoint} has not answered for {START_TIMEOUT_S:.0f} s", f"see {log}")
        self.process = process
        """The daemon that this command started; it has ended if another one took the address."""


def start_in_background(
    endpoint: str,
    store_path: Path,
    *,
    idle_exit_s: float = 60.0,
    log_path: Path | None = None,
    options: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start a daemon in a session of its own and wait until it answers.

    Its arguments are those of `ensure_daemon`.

    Raises:
        UserError: it does not answer within START_TIMEOUT_S, or another daemon does.
    """
    try:
        answer, process = ensure_daemon(
            endpoint, store_path, idle_exit_s=idle_exit_s, log_path=log_path, options=options
        )
    except SlowDaemonError as error:
        _end(error.process)
        raise
    if process is None:
        problem = f"a daemon (pid {answer.daemon_pid}) answers at {endpoint} already"
        raise UserError(problem, "end it with `zerotune daemon stop`")
    return process


def ensure_daemon(
    endpoint: str,
    store_path: Path,
    *,
    idle_exit_s: float = 60.0,
    log_path: Path | None = None,
    options: Sequence[str] = (),
) -> tuple[wire.StatusReply, subprocess.Popen[bytes] | None]:
    """Like `start_in_background`, for several commands at once: all get the answer of the daemon that took the address.

    The process is None if another command started the daemon.

    Args:
        idle_exit_s: the daemon ends by itself after this time without a message of any rank.
        log_path: appended to; None: `.daemon.log` beside the store.

    Raises:
        SlowDaemonError: no daemon answers within START_TIMEOUT_S; the started one runs on.
        UserError: the started one ended (with its log's last line), or its log or folder is unsafe or cannot be
            written.
    """
    command = [*python_with("zerotune.tuner.cli"), "daemon", "--endpoint", endpoint]
    command += ["--store", str(store_path), "--idle-exit", str(idle_exit_s), *options]
    log = (log_path or store_path.with_suffix(".daemon.log")).absolute()
    try:
        make_private(log.parent)
        refuse_open_folder(log, "log", _ELSEWHERE)
        with tempfile.TemporaryFile(dir=log.parent, buffering=0) as probe:  # a full disk would lose its last lines
            probe.write(bytes(LOG_ROOM_BYTES))
        # The log may have lines of another daemon. Only this user may read it, and links are not followed.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        opened = os.fdopen(os.open(log, flags, 0o600), "ab")
    except OSError as error:
        raise UserError(f"a daemon cannot write its log {log}: {error.strerror}", _ELSEWHERE) from error
    with opened as output:
        n_before = output.tell()
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:  # for example, no more processes or no memory
            raise UserError(f"a daemon cannot be started: {error.strerror}", "see `ulimit -a`") from error
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            answer = fetch_status(endpoint, timeout_s=0.3)
        except UserError:
            _end(process)
            raise
        listener = listener_pid(endpoint)
        if answer is not None:
            # A daemon in another container may have the same pid.
            if answer.daemon_pid == process.pid and listener in (process.pid, None):
                return answer, process
            _end(process)
            return answer, None
        if process.poll() is not None and holder_of(endpoint) is None and listener is None:
            break  # if there is a holder, another daemon won the race and will soon answer
        time.sleep(0.02)
    else:
        raise SlowDaemonError(endpoint, process, log)
    process.wait()
    raise UserError(f"the daemon did not start: {_last_words(log, n_before, process.returncode)}", f"see {log}")


def _last_words(log: Path, begin: int, code: int) -> str:
    with contextlib.suppress(OSError):
        if words := log.read_bytes()[begin:].decode(errors="replace").strip().splitlines():
            return words[-1].removeprefix("zerotune: ")
    return f"it left without a word, with code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the started daemon, which serves nobody."""
    if process.poll() is None:
        process.kill()
    process.wait()
