from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from daemon_process import Daemon
from numpy.typing import NDArray
from service_stubs import FABRIC, FakeStore, ScriptedBrain

from zerotune.store.wire import FLAG_TIMED, DaemonMessage, Hello, Welcome
from zerotune.tuner.join import OBSERVATION
from zerotune.tuner.modeling.requests import Request
from zerotune.tuner.service.service import Service


class Bench:
    """A service with everything around it scripted."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.store = FakeStore()
        self.brains: dict[str, ScriptedBrain] = {}
        self.unmakeable = ""
        """A job for which no brain can be made."""
        self.requests: list[Request] = []
        self.service = Service(self.store, self._brain, lambda: self.now_s, Welcome(1, "test"))
        self.service.learning.on_request = self.requests.append

    def _brain(self, job_id, fabric_id, fabric, knowledge, options) -> ScriptedBrain:
        if job_id == self.unmakeable:
            raise ValueError("scripted")
        self.brains[job_id] = ScriptedBrain(job_id, fabric_id, knowledge)
        return self.brains[job_id]

    def hello(
        self,
        rank: int,
        *,
        n_ranks: int = 4,
        job: str = "job",
        fabric: str = "fabric",
        epoch: int = 0,
        pid=1,
        name: str = "",
    ):
        message = Hello(job, rank, n_ranks, rank, "node", pid, fabric, FABRIC, 22809, 5, epoch, name=name)
        return self.send(rank, message, job=job)

    def send(self, rank: int, message, records=None, *, job: str = "job") -> list[tuple[bytes, DaemonMessage]]:
        return self.service.handle(f"{job}/{rank}".encode(), message, records)

    def join_all(self, n_ranks: int = 4, **fields) -> None:
        for rank in range(n_ranks):
            self.hello(rank, n_ranks=n_ranks, **fields)
        self.service.model_ready(fields.get("fabric", "fabric"), "knowledge")

    def tick(self, after_s: float = 1.0) -> list[tuple[bytes, DaemonMessage]]:
        """Advance the clock, then run every tick that is due."""
        self.now_s += after_s
        replies = []
        while self.service.next_tick_s <= self.now_s:
            replies += self.service.tick()
        return replies


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def records() -> Callable[..., NDArray[np.void]]:
    def make(n: int = 1, **fields: object) -> NDArray[np.void]:
        made = np.zeros(n, OBSERVATION)
        defaults = {
            "comm_id": 7, "message_bytes": 1 << 20, "start_ns": np.arange(n), "duration_us": 100.0,
            "sequence": np.arange(n), "n_ranks": 4, "n_nodes": 1, "collective": 2, "algorithm": 1, "protocol": 2,
            "n_channels": 8, "phase": 1, "timing_source": 1, "flags": FLAG_TIMED, "memory_pressure": 0.5,
        }  # fmt: skip
        for name, value in (defaults | fields).items():
            made[name] = value
        return made

    return make


@pytest.fixture
def private_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A short folder, since socket paths are limited to 107 bytes."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="zt-") as name:
        yield Path(name)


@pytest.fixture
def daemon(private_path) -> Iterator[Daemon]:
    daemon = Daemon(private_path)
    yield daemon
    daemon.end(signal.SIGKILL)


@pytest.fixture
def connect() -> Iterator:
    with zmq.Context() as context, contextlib.ExitStack() as stack:

        def make(endpoint: str) -> zmq.Socket:
            socket = stack.enter_context(context.socket(zmq.DEALER))
            socket.linger = 0
            socket.connect(endpoint)
            return socket

        yield make
