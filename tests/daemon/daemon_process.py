"""A daemon in a process of its own, as tests start it, and what its ranks say."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import zmq
import zmq.auth

from zerotune.store import wire
from zerotune.tuner.client.status import fetch_status
from zerotune.tuner.service.service import RANK_TIMEOUT_S

WAIT_S = 60
"""Longer than anything takes on a busy machine."""
SERVE = """
import sys
from zerotune.tuner.service import flood_guard, service
from zerotune.tuner.service.serving import run_daemon
flood_guard.MAX_RESIDENT_BYTES = 400 * 2**20
service.RANK_TIMEOUT_S = float(sys.argv[4])
code = run_daemon(sys.argv[1], sys.argv[2], idle_exit_s=float(sys.argv[3]) if sys.argv[3] else None)
assert not {"sklearn", "torch"} & set(sys.modules)  # fits have a process of their own
sys.exit(code)
"""


class Daemon:
    def __init__(
        self, folder, *, idle_exit_s="", store="store.db", name="d.sock", rank_timeout_s=RANK_TIMEOUT_S
    ) -> None:
        self.endpoint = f"ipc://{folder}/{name}"
        self.path = folder / store
        # -B: on a full disk it would leave compiled modules cut short.
        self.process = subprocess.Popen(
            [sys.executable, "-B", "-c", SERVE, self.endpoint, str(self.path), str(idle_exit_s), str(rank_timeout_s)],
            stderr=subprocess.PIPE,
        )
        deadline_s = time.monotonic() + WAIT_S
        while fetch_status(self.endpoint, 0.5) is None:
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    def end(self, number=signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, self.words = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode


def hello(rank=0, n_ranks=1, job="job") -> list:
    return wire.encode(wire.Hello(job, rank, n_ranks, rank, "node", 1, "fabric", {"emulated": "x"}, 22809, 5))


def receive(socket: zmq.Socket):
    assert socket.poll(1000 * WAIT_S), "no answer"
    return wire.decode_daemon(socket.recv_multipart())
