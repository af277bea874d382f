"""Jobs of real processes without NCCL: a plugin that records epochs, ranks that step and report."""

from __future__ import annotations

import random
import socket
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist

from zerotune.agent.agreement import Agreement, Pacing
from zerotune.agent.agreement.plan_table import PlanTable
from zerotune.store.errors import PlanError
from zerotune.store.records import Plan


class StubPlugin:
    """The plugin's plan tables: one table in force, one loaded, nothing else."""

    def __init__(self, refuses: frozenset[int] = frozenset()) -> None:
        self._active = 0
        self._loaded: int | None = None
        self._refuses = refuses

    def load_plan(self, plan: Plan) -> None:
        if plan.epoch in self._refuses:
            raise PlanError(f"epoch {plan.epoch} names an illegal cell")
        self._loaded = plan.epoch

    def flip(self, epoch: int) -> bool:
        if self._loaded != epoch:
            return False
        self._active, self._loaded = epoch, None
        return True

    def active_epoch(self) -> int:
        return self._active


def serve() -> dist.TCPStore:
    """A store on 127.0.0.1 alone.

    A dual-stack one, torch's default, asks the name server who each peer is, since hosts files do not
    know 127.0.0.1 as a mapped IPv6 address.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = listener.getsockname()[1]
    fd = listener.detach()
    timeout = timedelta(seconds=20)
    return dist.TCPStore("127.0.0.1", port, None, True, timeout, wait_for_workers=False, master_listen_fd=fd)


def connect(port: int, prefix: str = "zerotune/0") -> dist.Store:
    client = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
    return dist.PrefixStore(prefix, client)


def run_rank(
    rank: int,
    world_size: int,
    port: int,
    n_steps: int,
    seed: int,
    pipe: Connection,
    prefix: str = "zerotune/0",
    offers_until: int = 1 << 30,
) -> None:
    """One rank: random step times; rank 0 is offered a new plan as often as it can take one."""
    plugin = StubPlugin()
    n_calls = 0
    agreement = Agreement(
        connect(port, prefix),
        rank,
        world_size,
        PlanTable(plugin),
        lambda: n_calls,
        timeout_s=20,
        pacing=Pacing(base=1, limit=1),
    )
    while agreement.state == "starting":
        time.sleep(0.001)
    pipe.send("started")
    pipe.recv()
    stop = threading.Event()

    def daemon() -> None:
        epoch = 0
        while not stop.is_set() and plugin.active_epoch() < offers_until:
            epoch += 1
            agreement.offer(Plan(epoch, expires_after=10))
            stop.wait(0.0005)
        agreement.withdraw()

    offering = threading.Thread(target=daemon, daemon=True)
    if rank == 0:
        offering.start()
    random_delays = random.Random(seed * 64 + rank)
    epochs = []
    for _ in range(n_steps):
        n_calls += 3
        epochs.append(plugin.active_epoch())  # what this step's collectives ran under
        if random_delays.random() < 0.2:
            time.sleep(random_delays.random() * 0.004)
        agreement.boundary()
    stop.set()
    if rank == 0:
        offering.join()
    pipe.send((epochs, agreement.n_mismatches, agreement.state))
    pipe.recv()  # all ranks are through: the store may lose its clients
    agreement.close()
