"""What stands around the service in its tests: a store that remembers, a brain that follows a script, ranks' words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from zerotune.store import wire
from zerotune.store.records import (
    BASELINE,
    Collective,
    CommunicatorClass,
    Decision,
    DecisionKey,
    Exposure,
    MissingEvidence,
    Phase,
    Plan,
    Stage,
    StepRecord,
)

FABRIC = {"emulated": "one_node"}
KEY = DecisionKey(CommunicatorClass(4, 1), Collective.all_gather, Phase.forward_gather, 80)


class FakeStore:
    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, object]] = {}
        self.blocks: list[tuple[str, str, NDArray[np.void]]] = []
        self.steps: list[StepRecord] = []
        self.decisions: list[Decision] = []

    def record_job(self, job_id, fabric_id, fabric, n_ranks, name=""):
        self.jobs[job_id] = {"fabric_id": fabric_id, "fabric": fabric, "n_ranks": n_ranks, "name": name}

    def update_job(self, job_id, **news):
        if job_id in self.jobs:
            self.jobs[job_id] |= {name: known for name, known in news.items() if known is not None}

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
        self.missing_evidence = MissingEvidence.no_collectives
        self.n_explored = 0
        self.exposure = Exposure()
        self.memory = SimpleNamespace(is_short=False, pressure=0.5)
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


def report(bench, records, ranks=range(4), **fields):
    block = records(**fields)
    for rank in ranks:
        bench.send(rank, wire.Observations("job", rank, len(block)), block)


def steps(*numbers, epoch=0):
    return wire.Steps("job", 0, tuple(StepRecord(n, epoch, 1000.0 * n) for n in numbers))


def numbers(words):
    return [int(one) for one in re.findall(r"\d+", words)]


def kinds(replies):
    return [(sender.decode(), type(message).__name__) for sender, message in replies]
