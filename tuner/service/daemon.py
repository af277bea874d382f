"""The daemon's process: its sockets, its loop, and the service that makes the answers."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket as sockets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq

from ...agent.daemon_link.connection import new_context
from ...agent.daemon_link.receiving import is_logged, receive_frames
from ...store import wire
from ...store.errors import WireError
from ...store.job_options import JobOptions
from ...store.sqlite.database import Retention, Store
from ..modeling.learner import Learner, Loader
from ..same_machine import same_machine
from .daemon_status import DaemonStatus, version
from .endpoint import BoundEndpoint, check_second
from .flood_guard import FloodGuard
from .inbox import Inbox
from .process_limits import give_back_memory, raise_open_files, trim_memory
from .service import BrainFactory, Reply, Service
from .uplinks import Uplinks

if TYPE_CHECKING:
    from ..fleet.shelf import Shelf
    from ..fleet.writer import FleetWriter
    from ..learning.brain import BrainSettings

_log = logging.getLogger("zerotune.daemon")

SWITCH_INTERVAL_S: Final = 0.0005
"""Longest time that the store's writer thread holds the GIL before the loop's thread gets it."""
MESSAGES_PER_ROUND: Final = 64
ROUND_S: Final = 0.0005
"""Longest time for observations before the loop checks for urgent messages."""
RECEIVE_QUEUE_MESSAGES: Final = 64
"""Most waiting messages per rank; further ones stay with the agent, which drops and counts them."""
SEND_QUEUE_MESSAGES: Final = 256
LISTEN_BACKLOG: Final = 16_384
"""Most connections that wait to be accepted, for example at a job's start; the kernel may allow fewer."""
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
        """Failures of the daemon itself."""
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
        """There is no memory for a message: drop it and all waiting messages."""
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


def run_daemon(
    endpoint: str,
    store_path: Path | str,
    *,
    listen: str | None = None,
    idle_exit_s: float | None = None,
    curve_dir: Path | None = None,
    retention: Retention | None = None,
    settings: BrainSettings | None = None,
    brains: BrainFactory | None = None,
    load_knowledge: Loader | None = None,
    knowledge_pool: Path | None = None,
    fleet: FleetWriter | None = None,
    shelf: Shelf | None = None,
    on_ready: Callable[[Path, list[str]], None] = lambda store_path, addresses: None,
) -> int:
    """Serve until SIGTERM or SIGINT, then join and write all messages that have arrived.

    Args:
        endpoint: address for the ranks of this node.
        store_path: the SQLite file; created if missing.
        listen: second address, `tcp://`, for daemons of other nodes.
        idle_exit_s: end after this time without a connected rank; None: never.
        curve_dir: folder with the keys for `tcp://`.
        retention: when the store deletes old data; None: the store's default.
        settings: what brains may try; None: the defaults of `BrainSettings`.
        brains: makes a job's brain; None: `tuner.learning`'s. For tests.
        load_knowledge: loads the knowledge of a fabric's brains; None: `tuner.learning`'s. For tests.
        knowledge_pool: folder in which users share measurements; None: share with nobody.
        fleet: sends this node's measurements to other nodes; closed at the end.
        shelf: the book of other nodes' results; started and closed here.
        on_ready: called with the store's path and all addresses once ranks are served.

    Returns:
        Exit code 0.

    Raises:
        UserError: an address is taken, unsafe or not `tcp://` beside `ipc://`, or too few files can be opened.
        StoreError: the store cannot be used, or another daemon has it.
    """
    if listen is not None:
        check_second(listen, endpoint, curve_dir)
    wall_s = time.time() - time.monotonic()
    raise_open_files()
    context = new_context()
    socket = _router(context)
    bound: list[BoundEndpoint] = []
    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    guard = FloodGuard(socket)
    try:
        for address in filter(None, (endpoint, listen)):
            bound.append(BoundEndpoint(socket, address, curve_dir))
        with Store.open(store_path, retention=retention) as store:

            def clock() -> float:
                return wall_s + time.monotonic()  # wall-clock time that never jumps

            uplinks = Uplinks(context, curve_dir)
            welcome = wire.Welcome(os.getpid(), version(), _reachable(bound))
            share = None if fleet is None else fleet.measured
            service = Service(store, brains or _brains(clock, settings), clock, welcome, uplinks, share)
            status = DaemonStatus(
                endpoint, _options(settings), store, service, lambda: learner.n_failed, fleet, shelf, welcome.listen
            )
            daemon = Daemon(socket, service, clock, status.reply, uplinks)

            def learned(fabric_id: str, knowledge: object) -> None:
                trim_memory()  # the learner's thread read all measurements
                daemon.call_soon(lambda: service.model_ready(fabric_id, knowledge))

            learner = Learner(
                store,
                load_knowledge or _loader(knowledge_pool, shelf),
                None,
                learned,
            )
            service.learning.on_request = learner.ask
            if shelf is not None:
                shelf.on_news = lambda: daemon.call_soon(service.learning.load_anew)
                shelf.start()
            try:
                with _signals(daemon.stop, daemon.wake_fd):
                    on_ready(store.path, [one.address for one in bound])
                    daemon.run(idle_exit_s)
                    daemon.drain()  # a second signal does not interrupt this
            finally:
                if shelf is not None:
                    shelf.close()
                learner.close()
                if fleet is not None:
                    fleet.close()
                uplinks.close()
                daemon.close()
        return 0
    finally:
        sys.setswitchinterval(switch_interval_s)
        for one in bound:
            one.refuse_clients()
        guard.stop()
        socket.close(linger=200)
        context.term()  # this removes the socket's file and frees the address
        for one in bound:
            one.release()


def _options(settings: BrainSettings | None) -> wire.DaemonOptions:
    from ..learning.brain import BrainSettings

    return (settings or BrainSettings()).options()


def _reachable(bound: list[BoundEndpoint]) -> str:
    """The address for other nodes' daemons, if there is one."""
    return next((one.address for one in bound if one.address.startswith("tcp://")), "")


def _router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.MAXMSGSIZE, max(wire.MAX_BODY_BYTES, wire.MAX_RECORDS_BYTES))
    socket.setsockopt(zmq.BACKLOG, LISTEN_BACKLOG)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
    return socket


@contextlib.contextmanager
def _signals(stop: Callable[[], None], wake_fd: int) -> Iterator[None]:
    """Let SIGTERM and SIGINT stop the loop; only the main thread can handle them.

    Python runs handlers only when the loop is awake, so each signal also writes to `wake_fd`, which wakes it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    previous_fd = signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _brains(clock: Callable[[], float], settings: BrainSettings | None) -> BrainFactory:
    from ..learning.brain import Brain, BrainSettings
    from ..learning.explaining.shadow import ShadowBrain
    from ..learning.knowledge import Knowledge

    usual = settings or BrainSettings()

    def make(
        job_id: str,
        fabric_id: str,
        fabric: Mapping[str, str | int | float | bool],
        knowledge: object,
        options: JobOptions,
    ) -> Brain:
        known = knowledge if isinstance(knowledge, Knowledge) else Knowledge()
        chosen = _of_job(usual, options)
        kind = ShadowBrain if chosen.shadow else Brain
        return kind(job_id, fabric_id, fabric, known, chosen, clock)

    return make


def _of_job(usual: BrainSettings, given: JobOptions) -> BrainSettings:
    from msgspec.structs import replace

    return replace(
        usual,
        shadow=usual.shadow or given.shadow,
        tune_steps=given.tune_steps or usual.tune_steps,
        compare_steps=given.compare_steps or usual.compare_steps,
        own_steps=given.own_steps,
        chunk_sizes=given.chunk_sizes,
    )


def _loader(pool_folder: Path | None, shelf: Shelf | None) -> Loader:
    from ..learning.knowledge import Knowledge
    from ..modeling.knowledge_pool import KnowledgePool

    pool = None if pool_folder is None else KnowledgePool(pool_folder)

    def load(store: Store, fabric_id: str) -> Knowledge:
        import scipy.special  # noqa: F401 - takes 0.3 s: here on the learner's thread, not in the first decision

        known = Knowledge.from_store(store, fabric_id, pool)
        if shelf is not None and (recommended := shelf.recommended_on(fabric_id)):
            return known.with_recommendations(recommended, "the fleet's book")
        if (other := same_machine(store.fabrics(), fabric_id)) is not None:
            there = Knowledge.from_store(store, other).without_chunk_sizes()
            return known.with_recommendations(there.winners(), "this machine with other variables")
        return known

    return load
