"""Serves as a daemon until a signal: opens the addresses and the store, and puts the parts together."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq

from ...agent.daemon_link.connection import new_context
from ...store import wire
from ...store.job_options import JobOptions
from ...store.sqlite.database import Retention, Store
from ..modeling.learner import Learner, Loader
from ..same_machine import same_machine
from .daemon import Daemon
from .daemon_status import DaemonStatus, version
from .endpoint import BoundEndpoint, check_second
from .flood_guard import FloodGuard
from .process_limits import raise_open_files, trim_memory
from .service import BrainFactory, Service
from .uplinks import Uplinks

if TYPE_CHECKING:
    from ..fleet.shelf import Shelf
    from ..fleet.writer import FleetWriter
    from ..learning.brain import BrainSettings

SWITCH_INTERVAL_S: Final = 0.0005
"""Longest time that the store's writer thread holds the GIL before the loop's thread gets it."""
RECEIVE_QUEUE_MESSAGES: Final = 64
"""Most waiting messages per rank; further ones stay with the agent, which drops and counts them."""
SEND_QUEUE_MESSAGES: Final = 256
LISTEN_BACKLOG: Final = 16_384
"""Most connections that wait to be accepted, for example at a job's start; the kernel may allow fewer."""


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

    A missing store is created. `listen` is a second address, `tcp://`, for daemons of other nodes, with the keys of
    `curve_dir`. After `idle_exit_s` without a connected rank the daemon ends. `knowledge_pool` is a folder in which
    users share measurements.

    The function closes `fleet`, and starts and closes `shelf`. It calls `on_ready` with the store's path and all
    addresses once ranks are served. Tests pass `brains` and `load_knowledge` instead of those of `tuner.learning`. The
    exit code is 0.

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
