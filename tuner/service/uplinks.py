"""Connections to the leading daemons of jobs whose rank 0 is on another node.

As between an agent and its daemon, sends never wait. Messages that cannot be sent are counted and dropped. A daemon
counts as gone if it no longer answers.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Final

import zmq

from ...agent.daemon_link.keys import use_client_keys
from ...agent.daemon_link.receiving import is_logged, receive_frames
from ...store import wire
from ...store.errors import UserError, WireError, printable
from .network.names import Names
from .nodes import UplinksLike

_log = logging.getLogger("zerotune.daemon")

SEND_QUEUE_MESSAGES: Final = 64
MAX_UPLINKS: Final = 256
HEARTBEAT_MS: Final = 2000
MAX_RECEIVED: Final = 64
"""Most messages of one leading daemon at a time, so that an endless sender delays no other."""
ANEW_S: Final = 30.0
"""After this time without a successful send, connect anew: the leader's name may mean another host by now."""


class Uplinks(UplinksLike):
    """One socket for each job that is led elsewhere; without `client.key_secret` and `server.key`, none is reached."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys_dir: Path | None) -> None:
        self._context = context
        self._keys_dir = keys_dir
        self._names = Names()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._sent_at_s: dict[str, float] = {}
        """The time of the last send, or of the socket's creation, by job."""
        self._refused: set[str] = set()
        self.n_unsent = 0
        self._n_ignored = 0

    def send(self, job_id: str, endpoint: str, message: wire.Forwarded, records: Any) -> None:
        """Send a message if the queue has room; else drop and count it."""
        socket = self._sockets.get(job_id) or self._open(job_id, endpoint)
        if socket is None:
            return
        now_s = time.monotonic()
        try:
            socket.send_multipart(wire.encode(message, records), zmq.NOBLOCK)
            self._sent_at_s[job_id] = now_s
        except zmq.ZMQError:
            self.n_unsent += 1
            if now_s - self._sent_at_s[job_id] > ANEW_S:
                self.close(job_id)

    def receive(self) -> list[tuple[str, wire.DaemonMessage]]:
        """Messages of leading daemons since the last call, at most MAX_RECEIVED of each, with their jobs' ids."""
        received = []
        for job_id, socket in list(self._sockets.items()):
            try:
                for _ in range(MAX_RECEIVED):
                    received.append((job_id, wire.decode_daemon(receive_frames(socket))))
            except zmq.Again:
                continue
            except (zmq.ZMQError, WireError) as error:
                self._n_ignored += 1
                if is_logged(self._n_ignored):
                    text = "ignored message %d of other nodes' daemons, of the one that leads job %s: %s"
                    _log.warning(text, self._n_ignored, printable(job_id), error)
        return received

    def close(self, job_id: str | None = None) -> None:
        """Close one job's connection; None: all."""
        for closing in list(self._sockets) if job_id is None else [job_id]:
            socket = self._sockets.pop(closing, None)
            if socket is not None:
                del self._sent_at_s[closing]
                socket.close(linger=200)

    def _open(self, job_id: str, endpoint: str) -> zmq.Socket[bytes] | None:
        """A connection; None: the endpoint cannot be reached (logged once), or its name is not looked up yet."""
        if endpoint in self._refused or max(len(self._sockets), len(self._refused)) >= MAX_UPLINKS:
            return None
        scheme, _, place = endpoint.partition("://")
        host, _, port = place.rpartition(":")
        try:
            if self._keys_dir is None or scheme != "tcp":
                raise UserError(f"{endpoint} cannot be reached without keys", "start the daemon with --curve-keys")
            if not (number := self._names.number_of(host)):
                return None
            socket = self._connected(f"tcp://{number}:{port}", self._keys_dir)
        except (UserError, zmq.ZMQError) as error:
            _log.warning("job %s: its ranks on this node are measured alone: %s", *map(printable, (job_id, str(error))))
            self._refused.add(endpoint)
            return None
        self._sockets[job_id] = socket
        self._sent_at_s[job_id] = time.monotonic()
        return socket

    def _connected(self, address: str, keys_dir: Path) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
            socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_BODY_BYTES)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            # A cut link gives no signal: heartbeats make the connection anew once it is back.
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * HEARTBEAT_MS)
            # Queue nothing for a daemon that is not connected: it would come too late.
            socket.setsockopt(zmq.IMMEDIATE, 1)
            use_client_keys(socket, keys_dir)
            socket.connect(address)
        except (UserError, zmq.ZMQError):
            socket.close()
            raise
        return socket
