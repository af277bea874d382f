"""Connections to the leading daemons of jobs whose rank 0 is on another node.

Like an agent's line to its daemon: sends never wait, what cannot be sent is counted and dropped, and a daemon that is
gone is noticed only because it no longer answers.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import zmq

from zerotune.agent.daemon_link.keys import use_client_keys
from zerotune.agent.daemon_link.receiving import is_told, receive_frames
from zerotune.store import wire
from zerotune.store.errors import UserError, WireError, printable
from zerotune.tuner.service.nodes import UplinksLike

_log = logging.getLogger("zerotune.daemon")

SEND_QUEUE_MESSAGES: Final = 64
MAX_UPLINKS: Final = 256
HEARTBEAT_MS: Final = 2000


class Uplinks(UplinksLike):
    """One socket for each job that is led elsewhere.

    Args:
        context: the daemon's.
        keys_dir: folder with `client.key_secret` and `server.key`; None: no other daemon is reached.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys_dir: Path | None) -> None:
        self._context = context
        self._keys_dir = keys_dir
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._refused: set[str] = set()
        self.n_unsent = 0
        self._n_ignored = 0

    def send(self, job_id: str, endpoint: str, message: wire.Forwarded, records: Any) -> None:
        """Send what fits into the queue; the rest is counted."""
        socket = self._sockets.get(job_id) or self._open(job_id, endpoint)
        if socket is None:
            return
        try:
            socket.send_multipart(wire.encode(message, records), zmq.NOBLOCK)
        except zmq.ZMQError:
            self.n_unsent += 1

    def receive(self) -> list[tuple[str, wire.DaemonMessage]]:
        """Messages of leading daemons since the last call, each with its job's id."""
        received = []
        for job_id, socket in list(self._sockets.items()):
            try:
                while True:
                    received.append((job_id, wire.decode_daemon(receive_frames(socket))))
            except zmq.Again:
                continue
            except (zmq.ZMQError, WireError) as error:
                self._n_ignored += 1
                if is_told(self._n_ignored):
                    told = "ignored message %d of other nodes' daemons, of the one that leads job %s: %s"
                    _log.warning(told, self._n_ignored, printable(job_id), error)
        return received

    def close(self, job_id: str | None = None) -> None:
        """Close one job's connection; None: all."""
        for closing in list(self._sockets) if job_id is None else [job_id]:
            socket = self._sockets.pop(closing, None)
            if socket is not None:
                socket.close(linger=200)

    def _open(self, job_id: str, endpoint: str) -> zmq.Socket[bytes] | None:
        """A connection, or None where the endpoint cannot be reached from here, which is logged once."""
        if endpoint in self._refused or max(len(self._sockets), len(self._refused)) >= MAX_UPLINKS:
            return None
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_BODY_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # A cut link gives no sign: heartbeats make the connection anew once it is back.
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * HEARTBEAT_MS)
        # Nothing is queued for a daemon that is not there: it would come too late.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            if self._keys_dir is None or not endpoint.startswith("tcp://"):
                raise UserError(f"{endpoint} cannot be reached without keys", "start the daemon with --curve-keys")
            use_client_keys(socket, self._keys_dir)
            socket.connect(endpoint)
        except (UserError, zmq.ZMQError) as error:
            _log.warning("job %s: its ranks on this node are measured alone: %s", *map(printable, (job_id, str(error))))
            self._refused.add(endpoint)
            socket.close()
            return None
        self._sockets[job_id] = socket
        return socket
