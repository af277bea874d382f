"""The agent's channel to the daemon: a DEALER socket on its own thread.

Nothing here can delay training: sends never wait, and messages that cannot be sent are counted and dropped. A daemon
that stops answering counts as gone; Hellos go on, so that a new daemon can answer them.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq

from ...store import wire
from ...store.errors import UserError, WireError, printable
from ..settings import is_first_of_node
from .connection import Connection, new_context
from .receiving import is_logged, receive_frames

logger = logging.getLogger("zerotune.agent")

HELLO_EVERY_S = 1.0
COINCIDE_S = 0.3
"""A Hello may be sent this much earlier if the thread is awake anyway."""
DAEMON_TIMEOUT_S = 3.5
SEND_QUEUE_MESSAGES = 256
FLUSH_AT_EXIT_MS = 200
CONNECT_MS = 50
"""How long a Hello waits for the connection: messages sent before it exists would be lost."""
MAX_WAKES = 4096
"""Wake-ups that are read at once."""


class Outbox(Protocol):
    """The source of messages, which the channel's thread asks at each tick."""

    def tick_s(self) -> float:
        """Seconds until it is to be asked again."""

    def collect(self) -> Sequence[tuple[wire.AgentMessage, Any]]:
        """Messages and their records frames (or None)."""


class Channel:
    """Owns thread `zerotune-channel` and its socket.

    Args:
        endpoint: None: there is no daemon, and the thread only empties the outbox.
        hello: builds the Hello, or returns None while it cannot yet; called on the channel's thread.
        on_message: called on the channel's thread with each message of the daemon.
        on_alive: called with True when a daemon answers, and with False when it falls silent or this thread has failed.
    """

    def __init__(
        self,
        endpoint: str | None,
        hello: Callable[[], wire.Hello | None],
        outbox: Outbox,
        on_message: Callable[[wire.DaemonMessage], None],
        on_alive: Callable[[bool], None],
    ) -> None:
        self._connection = Connection(endpoint) if endpoint is not None else None
        self._has_warned = False
        self._hello = hello
        self._outbox = outbox
        self._on_message = on_message
        self._on_alive = on_alive
        self._goodbyes: deque[wire.AgentMessage] = deque()
        self._is_stopping = False
        self._wake_fds = os.pipe()
        self._thread = threading.Thread(target=self._run, name="zerotune-channel", daemon=True)
        self.n_unsent = 0
        self._n_ignored = self._n_refused = 0
        self.alive = False

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def wake(self) -> None:
        """Have the thread ask `outbox.tick_s` now."""
        os.write(self._wake_fds[1], b"x")

    def close(self, goodbye: wire.AgentMessage | None = None) -> None:
        """Send the remaining messages and `goodbye`, and stop; waits for at most a second."""
        if self._is_stopping:
            return
        if goodbye is not None:
            self._goodbyes.append(goodbye)
        self._is_stopping = True
        self.wake()
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            for fd in self._wake_fds:
                os.close(fd)

    def _run(self) -> None:
        try:
            context = new_context()
        except UserError as error:
            logger.warning("zerotune: %s; training goes on untuned", error)
            return
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, FLUSH_AT_EXIT_MS)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_BODY_BYTES)
        # Without a daemon nothing is queued: a daemon that returns gets current messages only.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            self._loop(socket)
        except Exception:
            logger.exception("the agent's channel stopped; training goes on untuned")
            self._set_alive(False)
        finally:
            socket.close()
            context.term()
            if self._connection is not None:
                self._connection.close()

    def _connect(self, socket: zmq.Socket[bytes]) -> None:
        if self._connection is None:
            return
        try:
            self._connection.connect(socket)
        except UserError as error:
            if not self._has_warned:
                self._has_warned = True
                level = logging.WARNING if is_first_of_node() else logging.INFO
                logger.log(level, "zerotune: %s; training goes on untuned", error)

    def _loop(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_fds[0], zmq.POLLIN)
        received_at = time.monotonic()
        hello_at = tick_at = received_at
        has_sent_hello = False
        self._connect(socket)
        while not self._is_stopping:
            # Messages from the daemon wake this thread at once; messages to it wait for the tick.
            pause_s = min(hello_at, tick_at) - time.monotonic()
            ready = dict(poller.poll(max(0, math.ceil(1000 * pause_s))))
            if self._wake_fds[0] in ready:
                os.read(self._wake_fds[0], MAX_WAKES)
            if socket in ready and not self._is_stopping:
                received_at = time.monotonic()
                self._receive(socket)
            now = time.monotonic()
            tick_at = min(tick_at, now + self._outbox.tick_s())
            if now < min(hello_at, tick_at):
                continue
            if self.alive and now - received_at > DAEMON_TIMEOUT_S:
                self._set_alive(False)
            if hello_at - now <= COINCIDE_S:
                self._connect(socket)
                hello = self._hello()
                if hello is not None:
                    has_sent_hello = True
                    if not self.alive:
                        socket.poll(CONNECT_MS, zmq.POLLOUT)
                    self._send(socket, hello, None)
                hello_at = now + (HELLO_EVERY_S if hello is not None else self._outbox.tick_s())
            for message, records in self._outbox.collect():
                self._send(socket, message, records)
            tick_at = now + self._outbox.tick_s()
        # A short job may know its id only now.
        if not has_sent_hello and (hello := self._hello()) is not None:
            self._send(socket, hello, None)
        for message, records in self._outbox.collect():
            self._send(socket, message, records)
        while self._goodbyes:
            self._send(socket, self._goodbyes.popleft(), None)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = receive_frames(socket)
            except zmq.Again:
                return
            try:
                message = wire.decode_daemon(frames)
            except WireError as error:
                self._n_ignored += 1
                if is_logged(self._n_ignored):
                    logger.warning("ignored message %d from the daemon: %s", self._n_ignored, error)
                continue
            if isinstance(message, wire.ErrorReply):
                self._n_refused += 1
                if is_logged(self._n_refused):
                    why = printable(f"{message.code}: {message.text}")
                    logger.warning("zerotune: refusal %d by the daemon: %s", self._n_refused, why)
            self._set_alive(True)
            self._on_message(message)

    def _send(self, socket: zmq.Socket[bytes], message: wire.AgentMessage, records: Any) -> None:
        try:
            socket.send_multipart(wire.encode(message, records), zmq.NOBLOCK)
        except zmq.Again:
            self.n_unsent += 1

    def _set_alive(self, alive: bool) -> None:
        if alive != self.alive:
            self.alive = alive
            self._on_alive(alive)
