"""A daemon in the background, for `launch --start-daemon` and the demo."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from zerotune.store.errors import UserError
from zerotune.tuner.client.status import fetch_status

START_TIMEOUT_S = 30.0


def start_in_background(
    endpoint: str,
    store_path: Path,
    *,
    idle_exit_s: float = 60.0,
    log_path: Path | None = None,
    options: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start a daemon as a process of its own session and wait until it answers.

    It leaves by itself when no rank has spoken for `idle_exit_s`. `options` are more words for `zerotune daemon`.

    Raises:
        UserError: it does not answer within START_TIMEOUT_S; its last words are in the message.
    """
    command = [sys.executable, "-m", "zerotune.tuner.cli", "daemon", "--endpoint", endpoint]
    command += ["--store", str(store_path), "--idle-exit", str(idle_exit_s), *options]
    log = (log_path or store_path.with_suffix(".daemon.log")).absolute()
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        opened = log.open("ab")  # another daemon's words may be in it
    except OSError as error:
        raise UserError(
            f"a daemon cannot write its log {log}: {error.strerror}",
            "give another place with --store or ZEROTUNE_STORE",
        ) from error
    with opened as output:
        n_before = output.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if fetch_status(endpoint, timeout_s=0.3) is not None:
            return process
    if process.poll() is None:
        process.kill()
        process.wait()
    words = log.read_bytes()[n_before:].decode(errors="replace").strip().splitlines()
    raise UserError(f"the daemon did not start: {words[-1] if words else 'no message'}", f"see {log}")
