"""Jobs that policies play: ours as the daemon feeds it, and all of them under one draw of noise."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.lib.data.data_sets import DataSet, Facts, Measured, Problem
from benchmarks.lib.simulated.host_view import IN_LOCKSTEP, HostView, Underway
from benchmarks.policy.regret_policies import Default
from zerotune.store.records import BASELINE, Candidate, DecisionKey, Plan, StepRecord, TimingSource, size_class
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling import trainer
from zerotune.tuner.modeling.correction.baked import Baked
from zerotune.tuner.modeling.statistics import statistics as statistics_of

COMM_SHARE_OF_STEP = 0.3
COMPUTE_NOISE = 0.01


class Ours(Default):
    """The brain, fed as the daemon feeds it, asked after every `looks_every`th step; plans are adopted at the next."""

    def __init__(
        self,
        name: str,
        problems: Sequence[Problem],
        facts: Facts,
        knowledge: Knowledge,
        looks_every: int = 1,
        *,
        view: HostView = IN_LOCKSTEP,
        compute_noise: float = COMPUTE_NOISE,
    ) -> None:
        self.name = name
        self._looks_every = looks_every
        self._underway = Underway(view)
        self._compute_noise = compute_noise
        self.brain = Brain(name, "fabric", facts, knowledge, BrainSettings(), lambda: 0.0)
        self.brain.restrict(Measured(facts, problems))
        self._problems = problems
        self._compute_us = sum(p.truth_us[0] for p in problems) * (1.0 / COMM_SHARE_OF_STEP - 1.0)
        self._rng = np.random.default_rng(0)
        self._step = self._adopted_at = 0
        self._plan = Plan(0)
        self._settings: dict[DecisionKey, Candidate] = {}
        self._rows: list[tuple[object, ...]] = []
        self.measured: list[np.ndarray] = []

    def choose(self, key: int) -> int:
        problem = self._problems[key]
        asked = self._settings.get(problem.key, BASELINE)
        return problem.candidates.index(asked) if asked in problem.candidates else 0

    def learn(self, key: int, arm: int, us: float) -> None:
        problem = self._problems[key]
        ran = problem.candidates[arm] if arm else problem.ran_by_default
        place = problem.key.communicator
        cell = (255, 255) if ran.algorithm is None else (int(ran.algorithm), int(ran.protocol or 0))
        self._rows.append(
            (
                place.n_ranks,
                place.n_nodes,
                problem.message_bytes,
                us,
                self._plan.epoch,
                self._step,
                math.nan,
                int(problem.key.collective),
                int(problem.key.phase),
                *cell,
                ran.n_channels,
                arm == 0,
                0,
                0,
                int(TimingSource.emulated),
                0,
            )
        )

    def end_of_step(self) -> None:
        block = np.array(self._rows, MEASUREMENT)
        self.measured.append(block)
        self._rows = []
        total_us = float(block["duration_us"].sum())
        compute_us = self._compute_us * math.exp(self._compute_noise * self._rng.standard_normal())
        record = StepRecord(self._step, self._plan.epoch, compute_us + total_us, total_us)
        ran, ended = self._underway.enqueued(block, record)
        if ran is not None:
            self.brain.observe(ran)
        if ended is not None:
            self.brain.step_finished(ended)
        self._step += 1
        proposed = self.brain.propose() if self._step % self._looks_every == 0 else None
        plan = proposed or self._plan.at(self._step - self._adopted_at)
        if plan is not self._plan:
            self._plan, self._adopted_at = plan, self._step
            self._settings = {
                DecisionKey(row.communicator, row.collective, phase, size_class(row.min_bytes)): row.candidate
                for row in plan.rows
                for phase in row.phases
            }
            self.brain.adopted(plan.epoch, self._step)


def play(
    problems: Sequence[Problem],
    policies: Sequence[Default],
    n_calls: int,
    seed: int,
    draw: Callable[[np.random.Generator, tuple[int, int]], np.ndarray] = np.random.Generator.standard_normal,
) -> np.ndarray:
    """Let policies choose, all of them under the same noise.

    Args:
        problems: keys with true times.
        policies: each starts as it is and learns.
        n_calls: per key.
        draw: noise of that shape, of spread 1.

    Returns:
        Index of the candidate that was chosen, shape (n_policies, n_keys, n_calls).
    """
    noise = draw(np.random.default_rng(seed), (len(problems), n_calls))
    arms = np.zeros((len(policies), len(problems), n_calls), dtype=np.int64)
    for call in range(n_calls):
        for at, policy in enumerate(policies):
            for key, problem in enumerate(problems):
                arm = arms[at, key, call] = policy.choose(key)
                policy.learn(key, arm, problem.truth_us[arm] * math.exp(problem.noise * noise[key, call]))
            policy.end_of_step()
    return arms


def warm_knowledge(data: DataSet, n_calls: int) -> Knowledge:
    """The model and the statistics that an earlier job with so many calls per key leaves in the store."""
    first = Ours("earlier", data.problems, data.facts, Knowledge())
    play(data.problems, [first], n_calls, seed=1)
    return knowledge_after(np.concatenate(first.measured), data.facts)


def knowledge_after(block: np.ndarray, facts: Facts) -> Knowledge:
    """The knowledge of a fabric's next job after these measurements (MEASUREMENT)."""
    record = trainer.fit(block, "fabric", facts)
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "store.db") as store:
        store.record_job("earlier", "fabric", dict(facts), int(block["n_ranks"][0]))
        store.record_measurements("fabric", "earlier", block)
        store.flush()
        statistics = statistics_of(store, "fabric")
    correction = Baked.from_bytes(record.blob) if record is not None else None
    model_id = record.training_hash[:8] if record is not None else ""
    return Knowledge(statistics, correction, model_id, [statistics])
