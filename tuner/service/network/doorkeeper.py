"""A program between the network and a daemon at `tcp://`: it forwards bytes, and limits connections without a key.

ZeroMQ accepts every connection, keeps it until the handshake ends, and ends the process if no descriptor is left. So
connections from the network come here first; this process forwards them to the daemon's socket in a private folder.
It closes connections that have not shown a key within HANDSHAKE_S, and the oldest of these if there are too many.
CURVE's READY, which a server sends only to clients it knows, shows that a connection has a key.

    python -m zerotune.tuner.service.network.doorkeeper LISTENING_FD SOCKET MAX_STRANGERS MAX_KNOWN

A byte on stdin ends all connections; the end of stdin ends the process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket as sockets
import sys
import time
from collections.abc import Callable
from typing import Final

HANDSHAKE_S: Final = 5.0
NO_ROOM_S: Final = 0.2
"""If no descriptor is left, no connection is accepted for this long."""
_BUFFER_BYTES: Final = 2**18
_HANDSHAKE_BYTES: Final = 1024
"""Greeting, WELCOME and READY take less."""
_READY: Final = b"\x05READY"


class _Connection:
    """A peer's connection and the matching one to the daemon."""

    def __init__(self, peer: sockets.socket, daemon: sockets.socket) -> None:
        self.since_s = time.monotonic()
        self.is_known = False
        self.ends = {peer: daemon, daemon: peer}
        self.waiting = {peer: b"", daemon: b""}
        """Bytes that each end has not taken yet."""
        self._daemon = daemon
        self._answered = b""

    def received(self, end: sockets.socket, data: bytes) -> None:
        """Keep the bytes of one end for the other."""
        self.waiting[self.ends[end]] = data
        if end is self._daemon and not self.is_known:
            self._answered = (self._answered + data)[:_HANDSHAKE_BYTES]
            self.is_known = _READY in self._answered


class Doorkeeper:
    """Serves peers of a listening socket until the end of stdin."""

    def __init__(self, listening: sockets.socket, daemon: str, max_strangers: int, max_known: int) -> None:
        self._listening, self._daemon = listening, daemon
        self._max_strangers, self._max_known = max_strangers, max_known
        self._open: dict[_Connection, None] = {}
        """Open connections, the oldest first."""
        self._shut_until_s = 0.0
        self._is_done = False
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        self._watch(listening, selectors.EVENT_READ, self._let_in)
        self._watch(sys.stdin.fileno(), selectors.EVENT_READ, self._stdin_ready)

    def run(self) -> None:
        """Forward bytes until the end of stdin."""
        while not self._is_done:
            for key, events in self._selector.select(NO_ROOM_S if self._shut_until_s or self._strangers() else None):
                if self._selector.get_map().get(key.fd) is key:  # an earlier call may have ended it
                    key.data(key.fileobj, events)
            now_s = time.monotonic()
            for one in [one for one in self._strangers() if now_s - one.since_s > HANDSHAKE_S]:
                self._end(one)
            if self._shut_until_s and now_s >= self._shut_until_s:
                self._shut_until_s = 0.0
                self._watch(self._listening, selectors.EVENT_READ, self._let_in)

    def _strangers(self) -> list[_Connection]:
        return [one for one in self._open if not one.is_known]

    def _let_in(self, _: object, __: int) -> None:
        try:
            peer, _address = self._listening.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            self._selector.unregister(self._listening)
            self._shut_until_s = time.monotonic() + NO_ROOM_S
            return
        daemon = sockets.socket(sockets.AF_UNIX)
        try:
            for end in (peer, daemon):
                end.setblocking(False)
            peer.setsockopt(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)
            peer.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
            daemon.connect(self._daemon)
        except OSError:  # the daemon has no descriptor left, or ends
            peer.close()
            daemon.close()
            return
        connection = _Connection(peer, daemon)
        self._open[connection] = None
        for end in connection.ends:
            self._watch(end, selectors.EVENT_READ, lambda end, events: self._pass_on(connection, end, events))
        strangers = self._strangers()
        if len(strangers) > self._max_strangers:
            self._end(strangers[0])

    def _pass_on(self, connection: _Connection, end: sockets.socket, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._write(connection, end)
            if events & selectors.EVENT_READ and not connection.waiting[connection.ends[end]]:
                if not (data := end.recv(_BUFFER_BYTES)):
                    raise ConnectionResetError
                was_known = connection.is_known
                connection.received(end, data)
                if connection.is_known and not was_known and len(self._open) > self._max_known:
                    n_known = len(self._open) - len(self._strangers())
                    if n_known > self._max_known:
                        raise ConnectionResetError
                self._write(connection, connection.ends[end])
            for one, other in connection.ends.items():  # read one end only after the other took all earlier bytes
                events = 0 if connection.waiting[other] else selectors.EVENT_READ
                events |= selectors.EVENT_WRITE if connection.waiting[one] else 0
                self._watch(one, events, lambda end, events: self._pass_on(connection, end, events))
        except BlockingIOError:
            pass
        except OSError:
            self._end(connection)

    def _write(self, connection: _Connection, end: sockets.socket) -> None:
        if connection.waiting[end]:
            with contextlib.suppress(BlockingIOError):
                connection.waiting[end] = connection.waiting[end][end.send(connection.waiting[end]) :]

    def _end(self, connection: _Connection) -> None:
        if connection in self._open:
            del self._open[connection]
            for end in connection.ends:
                self._watch(end, 0, None)
                end.close()

    def _stdin_ready(self, _: object, __: int) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            self._is_done = True
        for one in list(self._open):
            self._end(one)

    def _watch(self, end: sockets.socket | int, events: int, call: Callable[..., None] | None) -> None:
        known = self._selector.get_map().get(end)
        if known is not None and not events:
            self._selector.unregister(end)
        elif known is not None and known.events != events:
            self._selector.modify(end, events, call)
        elif known is None and events:
            self._selector.register(end, events, call)


if __name__ == "__main__":
    fd, path, *most = sys.argv[1:]
    with contextlib.suppress(KeyboardInterrupt), sockets.socket(fileno=int(fd)) as socket:
        Doorkeeper(socket, path, *map(int, most)).run()
