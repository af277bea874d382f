"""The daemon's process: its sockets, its loop, and the service that makes the answers."""

from __future__ import annotations

import contextlib
import logging
import math
import socket as sockets
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from ...agent.daemon_link.receiving import is_logged, receive_frames
from ...store import wire
from ...store.errors import WireError
from .inbox import Inbox
from .process_limits import give_back_memory
from .service import Reply, Service
from .uplinks import Uplinks

_log = logging.getLogger("zerotune.daemon")

MESSAGES_PER_ROUND: Final = 64
ROUND_S: Final = 0.0005
"""Longest time for observations before the loop checks for urgent messages."""
GIVE_BACK_EVERY_S: Final = 2.0
"""Pause between searches for an ended job's memory, each of which takes tens of milliseconds."""
STOOD_STILL_S: Final = 1.0
"""If a round of the loop comes later than this, the daemon itself was stopped for a while."""
ARRIVING_MS: Final = 50
"""At the daemon's end: how long to wait for a message that is still inside ZeroMQ."""
LONGEST_DRAIN_S: Final = 1.0
"""At the daemon's end: how long to read messages, since ranks go on sending."""


class Daemon:
    """One loop over the socket: receive a few messages, hand them to the service, send its answers."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        service: Service,
        clock: Callable[[], float],
        describe: Callable[[int, int], wire.StatusReply],
        uplinks: Uplinks,
    ) -> None:
        self._socket = socket
        self._service = service
        self._clock = clock
        self._describe = describe
        self._uplinks = uplinks
        self._woken, self._waker = sockets.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._inbox = Inbox()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self.n_errors = 0
        self.n_refused = 0
        """Messages that could not be decoded, and records with a number out of range."""

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop's thread; may be called from any thread."""
        self._calls.append(call)
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"c")

    @property
    def wake_fd(self) -> int:
        """File descriptor: a byte written to it wakes the loop."""
        return self._waker.fileno()

    def stop(self) -> None:
        """Leave the loop soon; may be called from a signal handler or any thread."""
        self._stopping = True
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"s")

    def run(self, idle_exit_s: float | None = None) -> None:
        """Serve until `stop`, or until no rank has been connected for `idle_exit_s`."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        leave_at_s = float("inf") if idle_exit_s is None else self._clock() + idle_exit_s
        meant_at_s = self._clock()
        n_ended, give_back_at_s = 0, meant_at_s
        while not self._stopping:
            self._receive()
            self._work_off()
            if (held_up_s := self._clock() - meant_at_s) > STOOD_STILL_S:
                self._service.stood_still(held_up_s)
            self._send(self._guarded(self._service.tick))
            self._send(self._guarded(self._from_leaders))
            while self._calls:
                self._guarded(self._calls.popleft())
            now_s = self._clock()
            if self._service.n_sessions and idle_exit_s is not None:
                leave_at_s = now_s + idle_exit_s
            elif now_s >= leave_at_s:
                _log.info("no rank for %s s: leaving", idle_exit_s)
                return
            meant_at_s = now_s
            if not self._inbox:
                has_ended = self._service.n_ended > n_ended
                if has_ended and now_s >= give_back_at_s:
                    n_ended, has_ended, give_back_at_s = self._service.n_ended, False, now_s + GIVE_BACK_EVERY_S
                    give_back_memory()
                due_at_s = min(self._service.next_tick_s, leave_at_s, give_back_at_s if has_ended else float("inf"))
                # An idle daemon waits without a timeout.
                poller.poll(None if due_at_s == float("inf") else max(0, math.ceil((due_at_s - now_s) * 1000)))
                meant_at_s = max(now_s, due_at_s)
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)

    def drain(self) -> None:
        """Take in, join and record all messages that have arrived already."""
        ends_at_s = self._clock() + LONGEST_DRAIN_S
        while self._clock() < ends_at_s and (self._inbox or self._socket.poll(ARRIVING_MS)):
            self._receive()
            self._work_off()
        self._guarded(self._service.close)

    def close(self) -> None:
        """Free the wake-up sockets."""
        self._woken.close()
        self._waker.close()

    def _receive(self) -> None:
        """Receive messages, and handle urgent ones at once."""
        for _ in range(MESSAGES_PER_ROUND):
            if not self._inbox.has_room:
                return
            try:
                sender, *frames = receive_frames(self._socket, 1)
            except zmq.Again:
                return
            except MemoryError:
                self._shed()
                return
            if not self._inbox.put(sender, frames):
                self._take(sender, frames)

    def _work_off(self) -> None:
        """Handle waiting messages, for as long as one round may last."""
        ends_at_s = self._clock() + ROUND_S
        while self._inbox:
            self._take(*self._inbox.take())
            if self._clock() >= ends_at_s:
                return

    def _shed(self) -> None:
        """Without memory for a message, drop it and all waiting messages."""
        self.n_errors += 1
        n_waiting, self._inbox = len(self._inbox), Inbox()
        give_back_memory()
        if is_logged(self.n_errors):
            _log.error("out of memory: %d messages of ranks were dropped", 1 + n_waiting)

    def _take(self, sender: bytes, frames: list[bytes]) -> None:
        self._send(self._guarded(lambda: self._answers(sender, frames)))

    def _answers(self, sender: bytes, frames: list[bytes]) -> list[Reply]:
        try:
            message, raw = wire.decode_agent(frames)
        except WireError as error:
            self.n_refused += 1
            return [(sender, wire.ErrorReply(type(error).__name__, str(error)))]
        if isinstance(message, wire.StatusRequest):
            return [(sender, self._describe(self.n_errors, self.n_refused + self._service.n_refused))]
        records = None
        if raw is not None:
            records, n_refused = wire.usable_records(message, raw)
            self.n_refused += n_refused
        return self._service.handle(sender, message, records)

    def _from_leaders(self) -> list[Reply]:
        return [
            reply
            for job_id, message in self._uplinks.receive()
            for reply in self._service.handle_uplink(job_id, message)
        ]

    def _guarded(self, call: Callable[[], list[Reply] | None]) -> list[Reply]:
        """The answers of `call`; an exception in it loses one message and does not end the daemon."""
        try:
            return call() or []
        except MemoryError:
            self._shed()
            return []
        except Exception:
            self.n_errors += 1
            if is_logged(self.n_errors):
                _log.exception("the daemon goes on after failure %d of its own", self.n_errors)
            return []

    def _send(self, replies: list[Reply]) -> None:
        for receiver, message in replies:
            # A receiver that has left or does not read loses the message.
            try:
                self._socket.send_multipart([receiver, *wire.encode(message)], zmq.NOBLOCK)
            except (zmq.ZMQError, MemoryError):
                pass
            except Exception:
                self.n_errors += 1
                if is_logged(self.n_errors):
                    _log.exception("an answer of type %s cannot be written", type(message).__name__)


