"""How many connected peers one daemon carries: what they cost in memory, and how soon `status` is answered beside them.

Idle ranks connect to a daemon of this machine and greet once per second, as agents do. They speak ZeroMQ's protocol
over plain sockets from one thread, since 10,000 sockets of pyzmq would need more memory than the daemon. Measured:

* connect_s: from the first connection until every rank has its first answer.
* status_worst_ms: the slowest of the answers to `zerotune status`, one after the other, while all greet.
* resident_mib: the daemon's memory while all are connected.
* resident_after_mib: the same after all have said goodbye.

With --jobs N the ranks belong to N jobs; a daemon refuses more jobs than `MAX_JOBS`.

Run: python -m benchmarks many_peers [--quick] [--json] [--peers N] [--jobs N]
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import psutil

from benchmarks.lib.argument_types import positive
from benchmarks.lib.reporting import Result, report
from zerotune.store import wire
from zerotune.tuner.client.status import fetch_status

N_PEERS, N_PEERS_QUICK = 10_000, 2_000
N_ASKED, N_ASKED_QUICK = 20, 5
GREET_EVERY_S: Final = 1.0
WAIT_S: Final = 120.0
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY: Final = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER" + b"\x08Identity" + bytes(4)
HANDSHAKE: Final = _GREETING + bytes([4, len(_READY)]) + _READY


def frames(message: wire.AgentMessage) -> bytes:
    """A message as it travels in ZMTP 3.0, without encryption."""
    header, body = (bytes(frame) for frame in wire.encode(message))
    return bytes([1, len(header)]) + header + b"\x02" + struct.pack(">Q", len(body)) + body


class Peers:
    """Connected ranks, greeted for from a thread of their own."""

    def __init__(self, path: str, n_peers: int, n_jobs: int) -> None:
        n_ranks = -(-n_peers // n_jobs)
        self._names = [(f"job{at // n_ranks}", at % n_ranks) for at in range(n_peers)]
        self._hellos = [
            frames(wire.Hello(job_id, rank, n_ranks, rank % 8, "node", 1, "many_peers", {"gpu": "none"}, 22809, 5))
            for job_id, rank in self._names
        ]
        self._sockets = [self._connect(path) for _ in range(n_peers)]
        self._answered: set[int] = set()
        self._lost: set[int] = set()
        self._halves: dict[int, bytes] = {}
        """By rank: what is left of a greeting that was taken in part."""
        self._is_stopping = False
        self._thread = threading.Thread(target=self._greet, daemon=True)
        self._thread.start()

    @staticmethod
    def _connect(path: str) -> socket.socket:
        one = socket.socket(socket.AF_UNIX)
        one.connect(path)  # waits where the daemon's queue of connections is full
        one.setblocking(False)
        one.sendall(HANDSHAKE)
        return one

    @property
    def n_answered(self) -> int:
        """Ranks that have had an answer beyond the handshake, and are connected."""
        return len(self._answered - self._lost)

    def _greet(self) -> None:
        poller = select.epoll()
        heard = [0] * len(self._sockets)
        places = {one.fileno(): place for place, one in enumerate(self._sockets)}
        for one in self._sockets:
            poller.register(one.fileno(), select.EPOLLIN)
        start_s, at, n = time.monotonic(), 0, len(self._sockets)
        while not self._is_stopping:
            due = min(int((time.monotonic() - start_s) / GREET_EVERY_S * n), at + 500)
            while at < due:
                if heard[at % n] >= len(HANDSHAKE):  # before the daemon's own half ZeroMQ takes a message for a mistake
                    self._say(at % n)
                at += 1
            for fd, _ in poller.poll(0.001):
                place = places[fd]
                try:
                    part = self._sockets[place].recv(1 << 16)
                except OSError:
                    part = b""
                heard[place] += len(part)
                if not part:
                    poller.unregister(fd)
                    self._lost.add(place)
                elif heard[place] > len(HANDSHAKE):
                    self._answered.add(place)
        poller.close()

    def _say(self, place: int) -> None:
        """A greeting; what the daemon does not take is dropped, as by an agent, but never half of one."""
        left = self._halves.pop(place, self._hellos[place])
        with contextlib.suppress(OSError):
            if n_left := len(left) - self._sockets[place].send(left):
                self._halves[place] = left[-n_left:]
            return
        if left is not self._hellos[place]:
            self._halves[place] = left

    def leave(self) -> None:
        """All say goodbye and go."""
        self._is_stopping = True
        self._thread.join()
        for place, (one, (job_id, rank)) in enumerate(zip(self._sockets, self._names, strict=True)):
            with contextlib.suppress(OSError):
                one.setblocking(True)
                one.sendall(self._halves.get(place, b"") + frames(wire.Goodbye(job_id, rank)))
            one.close()


def measure(folder: Path, n_peers: int, n_jobs: int, n_asked: int) -> list[Result]:
    """One daemon with so many peers.

    Args:
        folder: for its socket and store.
        n_peers: ranks that connect.
        n_jobs: jobs that they belong to.
        n_asked: how often its status is asked for.

    Returns:
        What was measured.
    """
    path = folder / "d.sock"
    endpoint = f"ipc://{path}"
    command = [sys.executable, "-m", "zerotune.tuner.cli", "daemon", "--endpoint", endpoint]
    with subprocess.Popen([*command, "--store", str(folder / "store.db")], stderr=subprocess.DEVNULL) as process:
        try:
            while fetch_status(endpoint, 0.5) is None:
                time.sleep(0.05)
            daemon = psutil.Process(process.pid)
            start_s = time.monotonic()
            peers = Peers(str(path), n_peers, n_jobs)
            while peers.n_answered < n_peers and time.monotonic() < start_s + WAIT_S:
                time.sleep(0.05)
            connect_s = time.monotonic() - start_s
            waits_ms = []
            for _ in range(n_asked):
                asked_s = time.monotonic()
                status = fetch_status(endpoint, WAIT_S)
                waits_ms.append((time.monotonic() - asked_s) * 1000)
                time.sleep(0.1)
            assert status is not None
            n_seen = sum(job.n_ranks_seen for job in status.jobs)
            resident_bytes = daemon.memory_info().rss
            peers.leave()
            ends_at_s = time.monotonic() + WAIT_S
            while (after := fetch_status(endpoint, WAIT_S)) and after.jobs and time.monotonic() < ends_at_s:
                time.sleep(0.2)
            time.sleep(3.0)  # a daemon gives memory back every two seconds at most
            after_bytes = daemon.memory_info().rss
        finally:
            process.send_signal(signal.SIGTERM)
    return [
        Result("peers_answered_share", peers.n_answered / n_peers, "", ">= 1"),
        Result("ranks_seen", n_seen, "", ""),
        Result("connect_s", connect_s, "s", ""),
        Result("status_worst_ms", max(waits_ms), "ms", "<= 1000"),
        Result("resident_mib", resident_bytes / 2**20, "MiB", "<= 1024"),
        Result("resident_after_mib", after_bytes / 2**20, "MiB", ""),
    ]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{N_PEERS_QUICK:,} peers; ends within 60 s")
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    parser.add_argument("--peers", type=positive, help=f"how many (default: {N_PEERS:,})")
    parser.add_argument("--jobs", type=positive, default=64, help="jobs that they belong to (default: 64)")
    arguments = parser.parse_args()
    n_peers = arguments.peers or (N_PEERS_QUICK if arguments.quick else N_PEERS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if n_peers + 100 > most:
        parser.error(f"--peers {n_peers}: this user may have {most} files open at most (`ulimit -Hn`)")
    with tempfile.TemporaryDirectory() as name:
        results = measure(
            Path(name), n_peers, min(arguments.jobs, n_peers), N_ASKED_QUICK if arguments.quick else N_ASKED
        )
    report("many_peers", results, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
