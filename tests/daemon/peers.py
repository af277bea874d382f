"""Many ranks of one process. They speak ZeroMQ's protocol over plain sockets: those of pyzmq would take more memory."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from typing import Final

from zerotune.store import wire

GREET_EVERY_S: Final = 1.0
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
