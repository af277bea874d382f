from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from store.records import BASELINE, Collective, CommunicatorClass, Decision, DecisionKey, Phase, Plan, Stage, StepRecord
from store.wire import DaemonMessage, Hello, Welcome
from tuner.join import FLAG_TIMED, OBSERVATION
from tuner.service import Request, Service

FABRIC = {"emulated": "one_node"}
KEY = DecisionKey(CommunicatorClass(4, 1), Collective.all_gather, Phase.forward_gather, 80)


class FakeStore:
    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, object]] = {}
        self.blocks: list[tuple[str, str, NDArray[np.void]]] = []
        self.steps: list[StepRecord] = []
        self.decisions: list[Decision] = []

    def record_job(self, job_id, fabric_id, fabric, n_ranks):
        self.jobs[job_id] = {"fabric_id": fabric_id, "fabric": fabric, "n_ranks": n_ranks}

    def update_job(self, job_id, *, stage=None, ended_at_s=None):
        self.jobs[job_id] |= {"stage": stage, "ended_at_s": ended_at_s}

    def record_measurements(self, fabric_id, job_id, block):
        self.blocks.append((fabric_id, job_id, block))

    def record_steps(self, job_id, steps: Sequence[StepRecord]):
        self.steps += steps

    def record_decisions(self, decisions: Sequence[Decision]):
        self.decisions += decisions

    @property
    def measurements(self) -> NDArray[np.void]:
        return np.concatenate([block for _, _, block in self.blocks])


class ScriptedBrain:
    """Remembers what it is told, proposes what the test scripts."""

    def __init__(self, job_id: str = "", fabric_id: str = "", knowledge: object = None) -> None:
        self.job_id = job_id
        self.fabric_id = fabric_id
        self.knowledge = knowledge
        self.stage = Stage.unknown
        self.n_explored = 0
        self.spent_percent = 0.0
        self.told: list[tuple[str, object]] = []
        self.plans: list[Plan] = []
        self.failing = False

    def _note(self, what: str, detail: object) -> None:
        if self.failing:
            raise ZeroDivisionError("scripted")
        self.told.append((what, detail))

    def observe(self, block):
        self._note("observe", block)

    def cost_tables(self, block):
        self._note("cost_tables", block)

    def step_finished(self, step):
        self._note("step", step)

    def sequence(self, block):
        self._note("sequence", block)

    def adopted(self, epoch, step):
        self._note("adopted", (epoch, step))

    def propose(self):
        return self.plans.pop(0) if self.plans else None

    def decisions(self):
        if not self.plans and self.told and self.told[-1][0] == "step":
            step = self.told[-1][1]
            return [Decision(self.job_id, self.fabric_id, KEY, BASELINE, step.epoch, "keep", "scripted")]
        return []

    def names(self) -> list[str]:
        return [what for what, _ in self.told]


class Bench:
    """A service with everything around it scripted."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.store = FakeStore()
        self.brains: dict[str, ScriptedBrain] = {}
        self.requests: list[Request] = []
        self.service = Service(self.store, self._brain, lambda: self.now_s, Welcome(1, "test"))
        self.service.on_request = self.requests.append

    def _brain(self, job_id, fabric_id, fabric, knowledge) -> ScriptedBrain:
        self.brains[job_id] = ScriptedBrain(job_id, fabric_id, knowledge)
        return self.brains[job_id]

    def hello(self, rank: int, *, n_ranks: int = 4, job: str = "job", fabric: str = "fabric", epoch: int = 0, pid=1):
        message = Hello(job, rank, n_ranks, rank, "node", pid, fabric, FABRIC, 22809, 5, epoch)
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
