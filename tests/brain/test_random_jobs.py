"""Jobs in which everything happens: no error, no setting that may not run, no budget overspent.

Several communicators, keys that come and go, absurd times, undescribed hardware, memory that gets short and free again,
other networks, cost tables that come late, records that come after their steps, what other jobs measured, daemons that
start anew.
"""

from __future__ import annotations

import math
import random
import zlib
from typing import NamedTuple

import numpy as np
import pytest

from zerotune.agent.nccl import fabric
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Plan,
    Protocol,
    StepRecord,
    size_class,
    size_class_range,
)
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.store.wire import COST_FIELDS
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.learning.policy.risk import FIRST_LOOK_STEPS
from zerotune.tuner.modeling.features import cell_of

PHASES = {
    Collective.all_gather: (Phase.forward_gather, Phase.backward_gather, Phase.post_step_gather, Phase.other),
    Collective.reduce_scatter: (Phase.gradient_scatter, Phase.other),
    Collective.all_reduce: (Phase.gradient_scatter, Phase.other),
    Collective.broadcast: (Phase.other,),
}
SIZES = (1, 8, 1 << 10, 1 << 17, 1 << 20, (1 << 24) + 13, 1 << 28, 1 << 33)
ABSURD_US = (5e-324, 1e-9, 0.0, -5.0, 1e7, 1e12, math.inf, math.nan)
CELLS = [(algorithm, protocol) for algorithm in Algorithm for protocol in Protocol]
Call = tuple[CommunicatorClass, Collective, Phase, int]


class Line(NamedTuple):
    """What an earlier job left of one setting."""

    key: DecisionKey
    candidate: Candidate
    is_default: bool
    median_us: float
    count: int
    std_us: float
    level_std: float = 0.0


class Job:
    """Random from a seed, within what NCCL and the agent may report."""

    def __init__(self, seed: int) -> None:
        self.random, self.rng, self.seed = random.Random(seed), np.random.default_rng(seed), seed
        name = self.random.choice([*fabric.names(), "", ""])
        self.machine = fabric.load(name) if name else None
        self.facts = {**self.machine.describe(), "emulated": name} if self.machine is not None else {}
        if self.random.random() < 0.3:
            self.facts |= {"device_mb": self.random.choice([500, 8000]), "channel_mb": self.random.choice([0, 4])}
        most = self.machine.max_ranks if self.machine is not None else 64
        counts = [self.random.choice([n for n in (2, 4, 8, 16) if n <= most]) for _ in range(2)]
        self.places = [
            self.machine.communicator(range(n)) if self.machine is not None else CommunicatorClass(n, max(1, n // 8))
            for n in counts
        ]
        self.noise, self.step_noise = self.random.choice([0.0, 0.02, 0.1]), self.random.choice([0.0, 0.01, 0.05])
        self.compute_us = self.random.choice([0.0, 1e4, 1e6])
        self.latency_steps, self.report_every = self.random.choice([1, 2, 5]), self.random.choice([1, 1, 4, 20])
        self.settings = BrainSettings(
            budget_fraction=self.random.choice([0.01, 0.01, 0.05, 0.0]), explore=self.random.random() > 0.1
        )
        self.slowdown, self.pressure, self.step = 1.0, 0.3, 0
        self.plan, self.adopted_at, self.on_its_way = Plan(0), 0, list[tuple[int, Plan]]()
        self.ends_looks = self.random.random() > 0.1
        self.change_calls()
        self.start_daemon()

    def knowledge(self) -> Knowledge:
        """What other jobs measured, at keys of this one: also what NCCL does not offer here."""
        lines = []
        for place, collective, phase, message_bytes in self.calls if self.random.random() < 0.5 else ():
            key = DecisionKey(place, collective, phase, size_class(message_bytes))
            settings = [Candidate(self.random.choice(CELLS)[0], self.random.choice(CELLS)[1], n) for n in (1, 8, 16)]
            for candidate in (BASELINE, *settings):
                median_us, count = self.random.choice([10.0, 11.0, 30.0, 1e4]), self.random.choice([1, 5, 500])
                lines.append(Line(key, candidate, candidate.is_baseline, median_us, count, 0.1 * median_us))
        return Knowledge(lines, by_job=[lines])

    def start_daemon(self) -> None:
        self.brain = Brain("job", "fabric", self.facts, self.knowledge(), self.settings, lambda: 0.0)
        self.on_its_way.clear()
        if self.plan.epoch:
            self.brain.adopted(self.plan.epoch, self.step)

    def change_calls(self) -> None:
        self.calls: list[Call] = []
        for _ in range(self.random.choice([1, 3, 12, 30])):
            collective = self.random.choice(list(PHASES))
            call = self.random.choice(self.places), collective, self.random.choice(PHASES[collective])
            self.calls += [(*call, self.random.choice(SIZES))] * self.random.choice([1, 2, 4])

    def expire(self) -> None:
        self.brain.adopted(0, self.step)
        self.plan = Plan(0)
        self.on_its_way.clear()

    def report_costs(self) -> None:
        table = np.zeros(1, np.dtype(COST_FIELDS))
        place, collective, _, message_bytes = self.random.choice(self.calls)
        table["n_ranks"], table["n_nodes"] = place.n_ranks, place.n_nodes
        table["collective"], table["message_bytes"] = int(collective), message_bytes
        table["cost_us"] = self.rng.choice([-1.0, 5.0, 100.0, 1e4], table["cost_us"].shape)
        self.brain.cost_tables(table)

    def something_happens(self) -> None:
        kind = self.random.random()
        if kind < 0.02:
            self.change_calls()
        elif kind < 0.04:
            self.slowdown = self.random.choice([0.5, 1.0, 1.6, 10.0])
        elif kind < 0.08:
            self.pressure = self.random.choice([0.0, 0.3, 0.6, 0.95, 1.0])
        elif kind < 0.09:
            self.start_daemon()
        elif kind < 0.1:
            self.expire()
        elif kind < 0.11:
            self.report_costs()
        elif kind < 0.12:
            self.brain.knowledge = self.knowledge()

    def chosen(self, call: Call) -> Candidate:
        for row in self.plan.rows:
            if (row.communicator, row.collective, row.phase) == call[:3] and row.min_bytes <= call[3] <= row.max_bytes:
                return row.candidate
        return BASELINE

    def runs(self, call: Call) -> tuple[Candidate, float]:
        asked = self.chosen(call)
        most = self.machine.max_channels(call[0]) if self.machine is not None else 24
        ran = Candidate(Algorithm.ring, Protocol.simple, min(16, most))
        factor = 1.0
        if asked.algorithm is not None:
            ran = Candidate(asked.algorithm, asked.protocol, min(asked.n_channels, most))
            lot = random.Random(zlib.crc32(f"{self.seed} {call} {ran}".encode()))
            factor = lot.choice([0.5, 0.8, 0.95, 1.0, 1.1, 1.5, 1.9, 2.5, 8.0, 60.0])
        return ran, (10.0 + call[3] / 2e4) * factor * self.slowdown

    def run_step(self) -> tuple[np.ndarray, StepRecord]:
        block = np.zeros(len(self.calls), MEASUREMENT)
        is_odd, total_us = self.random.random() < 0.02, 0.0
        for row, call in zip(block, self.calls, strict=True):
            ran, us = self.runs(call)
            us *= math.exp(self.rng.normal(0.0, self.noise))
            total_us += us
            row["duration_us"] = self.random.choice(ABSURD_US) if is_odd and self.random.random() < 0.3 else us
            row["n_ranks"], row["n_nodes"] = call[0].n_ranks, call[0].n_nodes
            row["collective"], row["phase"], row["message_bytes"] = int(call[1]), int(call[2]), call[3]
            row["algorithm"], row["protocol"], row["n_channels"] = ran.algorithm, ran.protocol, ran.n_channels
            row["is_default"] = self.chosen(call).is_baseline
            row["epoch"], row["step"] = self.plan.epoch, self.step
            row["memory_pressure"] = self.random.choice([self.pressure, math.nan])
        step_us = self.compute_us * math.exp(self.rng.normal(0.0, self.step_noise)) + total_us
        if self.random.random() < 0.02:
            step_us = self.random.choice(ABSURD_US)
        exposed_us = self.random.choice([None, math.nan, 0.0, 0.5 * total_us, total_us])
        record = StepRecord(self.step, self.plan.epoch, step_us, exposed_us, self.random.choice([None, self.pressure]))
        self.step += self.random.choice([1] * 30 + [7])
        return block, record

    def play(self, n_steps: int) -> None:
        blocks: list[np.ndarray] = []
        records: list[StepRecord] = []
        for _ in range(n_steps):
            self.something_happens()
            block, record = self.run_step()
            blocks.append(block)
            records.append(record)
            if len(blocks) >= self.report_every:
                self.report(np.concatenate(blocks), records)
                blocks, records = [], []
                plan = self.brain.propose()
                self.brain.decisions()
                if plan is not None:
                    self.check(plan)
                    self.on_its_way.append((self.step + self.latency_steps - 1, plan))
            while self.on_its_way and self.on_its_way[0][0] <= self.step:
                self.follow(self.on_its_way.pop(0)[1])
            if self.ends_looks and (later := self.plan.at(self.step - self.adopted_at)) is not self.plan:
                self.follow(later)

    def follow(self, plan: Plan) -> None:
        self.plan, self.adopted_at = plan, self.step
        self.brain.adopted(plan.epoch, self.step)

    def report(self, block: np.ndarray, records: list[StepRecord]) -> None:
        """Steps may become known before their calls."""
        is_late = self.random.random() < 0.3
        if not is_late:
            self.brain.observe(block)
        for record in records:
            self.brain.step_finished(record)
        if is_late:
            self.brain.observe(block)

    def check(self, plan: Plan) -> None:
        brain = self.brain
        assert math.isfinite(brain.budget.spent_us)
        assert math.isfinite(brain.spent_percent)
        states = {
            (key.communicator, key.collective, key.phase, size_class_range(key.size_class)): one
            for one in brain.keys
            for key in (one.key,)
        }
        for row in plan.rows:
            place, asked = (row.communicator, row.collective), row.candidate
            assert cell_of(asked) in {cell_of(one) for one in brain.costs.candidates(*place)}
            found = [states.get((*place, phase, (row.min_bytes, row.max_bytes))) for phase in row.phases]
            known = [one for one in found if one is not None]
            state = known[0] if known else None
            for one in known:
                assert asked not in one.banned
                assert asked.n_channels <= one.max_channels
            if brain.memory.is_short and (state is None or asked != state.incumbent):
                assert brain.memory.has_room_for(asked, row.communicator)
        if plan.then and plan.then[0].n_steps == FIRST_LOOK_STEPS:
            after = brain.plan
            assert after is not None
            assert plan.stages()[1][1] == after.plan
        for _, stage in plan.stages()[1:]:
            self.check(stage)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("seed", [*range(10), 118, 162])
def test_random_jobs_never_fail_and_run_only_legal_settings(seed: int) -> None:
    job = Job(seed)
    job.play(200)
    assert job.brain.n_keys or not job.plan.rows
