"""The agent's line to the daemon: a DEALER socket on its own thread.

Nothing here can hold training up: sends never wait, what cannot be sent is counted and dropped, a
daemon that dies is noticed by its silence and greeted again when one answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq

from store import wire
from store.errors import WireError

logger = logging.getLogger("zerotune.agent")

HELLO_EVERY_S = 1.0
SILENCE_S = 3.5
SEND_QUEUE_MESSAGES = 256
FLUSH_AT_EXIT_MS = 200


class Outbox(Protocol):
    """What the channel's thread asks at each tick for messages to send."""

    def collect(self) -> Sequence[tuple[wire.AgentMessage, Any]]:
        """Messages and their records frames (or None)."""


class Channel:
    """Owns the socket and the thread.

    Args:
        endpoint: ZeroMQ endpoint of the daemon; None: there is none, the thread only empties the outbox.
        hello: builds the greeting, or None while it cannot yet; called on the channel's thread.
        outbox: asked every `tick_ms` for what is to be sent.
        on_message: called on the channel's thread with each message of the daemon.
        on_alive: called with True when a daemon answers, with False when it has gone silent.
    """

    def __init__(
        self,
        endpoint: str | None,
        hello: Callable[[], wire.Hello | None],
        outbox: Outbox,
        on_message: Callable[[wire.DaemonMessage], None],
        on_alive: Callable[[bool], None],
        tick_ms: int,
    ) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._outbox = outbox
        self._on_message = on_message
        self._on_alive = on_alive
        self._tick_ms = tick_ms
        self._farewells: deque[wire.AgentMessage] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerotune-channel", daemon=True)
        self.n_unsent = 0
        self.alive = False

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def close(self, farewell: wire.AgentMessage | None = None) -> None:
        """Send what is left, say goodbye, stop; waits for at most a second."""
        if farewell is not None:
            self._farewells.append(farewell)
        self._stop.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, FLUSH_AT_EXIT_MS)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_BODY_BYTES)
        # Without a daemon nothing is queued: a daemon that returns gets fresh news, not old.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            if self._endpoint is not None:
                socket.connect(self._endpoint)
            self._loop(socket)
        except Exception:
            logger.exception("the agent's channel stopped; training goes on untuned")
        finally:
            self._set_alive(False)
            socket.close()
            context.term()

    def _loop(self, socket: zmq.Socket[bytes]) -> None:
        greeted_at, heard_at = -HELLO_EVERY_S, time.monotonic()
        while not self._stop.is_set():
            if socket.poll(self._tick_ms):
                heard_at = time.monotonic()
                self._receive(socket)
            now = time.monotonic()
            if now - greeted_at >= HELLO_EVERY_S and (hello := self._hello()) is not None:
                self._send(socket, hello, None)
                greeted_at = now
            if self.alive and now - heard_at > SILENCE_S:
                self._set_alive(False)
            for message, records in self._outbox.collect():
                self._send(socket, message, records)
        for message, records in self._outbox.collect():
            self._send(socket, message, records)
        while self._farewells:
            self._send(socket, self._farewells.popleft(), None)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = wire.decode_daemon(frames)
            except WireError as error:
                logger.warning("ignored a frame from the daemon: %s", error)
                continue
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
