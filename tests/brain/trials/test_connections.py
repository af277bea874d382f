"""First calls that take longer because something is connected: what they cost is charged, and is no verdict."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Protocol,
    StepRecord,
)
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.policy.accounting import TrialAccounting
from zerotune.tuner.learning.policy.change_detection import Regimes
from zerotune.tuner.learning.policy.keys import CandidateTables, KeyState
from zerotune.tuner.learning.policy.risk import Budget
from zerotune.tuner.learning.policy.surrogate import Surrogate
from zerotune.tuner.modeling.cost_prior import CostPrior

RING, TREE = (Candidate(algorithm, Protocol.simple, 4) for algorithm in (Algorithm.ring, Algorithm.tree))
PLACE = CommunicatorClass(8, 1)
KEY = DecisionKey(PLACE, Collective.all_reduce, Phase.gradient_scatter, 92)


@dataclass
class ConnectingWorld(World):
    """All calls take 300 us, or `factor` of it with another algorithm than NCCL's own; what runs for the first time is
    connected, which the first call shows, or only the step.
    """

    connection_us: float = 20_000.0
    factor: float = 1.0
    calls_show_it: bool = True
    begins_connected: bool = True
    connected: set[int] = field(default_factory=set)
    lost_us: float = 0.0

    def truth(self, call: Call, candidate: Candidate) -> tuple[float, Candidate]:
        ran = self.setting(call, candidate)
        is_other = ran.algorithm != self.setting(call, BASELINE).algorithm
        return 300.0 * (self.factor if is_other else 1.0), ran

    def run_step(self) -> tuple[np.ndarray, StepRecord]:
        block, record = super().run_step()
        extra_us = 0.0
        for row in block:
            if int(row["algorithm"]) not in self.connected:
                self.connected.add(int(row["algorithm"]))
                if record.step or not self.begins_connected:
                    extra_us += self.connection_us
                    row["duration_us"] += self.connection_us if self.calls_show_it else 0.0
        self.lost_us += extra_us
        exposed_us = record.exposed_us + (extra_us if self.calls_show_it else 0.0)
        return block, msgspec.structs.replace(record, duration_us=record.duration_us + extra_us, exposed_us=exposed_us)


def _calls(n_calls: int = 1) -> list[Call]:
    return [Call(Collective.all_reduce, Phase.gradient_scatter, 1 << 23)] * n_calls


def _takes_us(world: World, brain: Brain) -> float:
    return world.truth(world.calls[0], brain.keys[0].incumbent)[0]


@pytest.mark.parametrize("n_calls", [1, 3])
@pytest.mark.parametrize("connection_us", [1_000.0, 20_000.0])
@pytest.mark.parametrize("calls_show_it", [True, False])
def test_a_setting_twice_as_fast_wins_though_its_first_call_is_slow(
    n_calls: int, connection_us: float, calls_show_it: bool
) -> None:
    """At the latest once the budget has earned what connecting took: nothing is explored before."""
    steps_to_earn = connection_us / (0.01 * 1_000.0)
    for seed in (31, 32):
        world = ConnectingWorld(
            "h100_node",
            PLACE,
            _calls(n_calls),
            compute_us=1_000.0,
            connection_us=connection_us,
            factor=0.5,
            calls_show_it=calls_show_it,
            seed=seed,
        )
        brain = make_brain(world)
        play(world, brain, 20)
        while _takes_us(world, brain) != 150.0 and world.step < 500 + steps_to_earn:
            play(world, brain, 1)
        play(world, brain, 30)
        assert world.lost_us
        assert _takes_us(world, brain) == 150.0, "and it is kept"


@pytest.mark.parametrize("calls_show_it", [True, False])
def test_the_cost_of_connecting_is_charged(calls_show_it: bool) -> None:
    """Where there is nothing to gain, nothing pays it back, and it is overdrawn once."""
    world = ConnectingWorld("h100_node", PLACE, _calls(), compute_us=1_000.0, calls_show_it=calls_show_it, seed=33)
    brain = make_brain(world)
    play(world, brain, 400)
    assert world.lost_us == 20_000.0
    assert brain.budget.spent_us == pytest.approx(world.lost_us, rel=0.2)
    assert brain.budget.remaining_us < 0


@pytest.mark.parametrize("n_calls", [1, 3])
def test_connecting_in_the_first_step_makes_no_setting_seem_fast(n_calls: int) -> None:
    for seed in range(34, 36):
        world = ConnectingWorld(
            "h100_node", PLACE, _calls(n_calls), compute_us=1_000.0, begins_connected=False, seed=seed
        )
        world.calls += [Call(Collective.all_gather, Phase.forward_gather, 1 << 23)] * n_calls
        brain = make_brain(world)
        play(world, brain, 200)
        assert not [one for one in brain.decisions() if one.kind == "promote"]


class Job:
    """One key with a trial; durations of its calls in, what became of it out."""

    def __init__(self) -> None:
        self.state = KeyState(0, KEY, 1 << 23)
        self.state.default_setting = RING
        self.state.trial = RING
        surrogate = Surrogate(CandidateTables(CostPrior({})), Regimes())
        surrogate.tables.register(self.state)
        self.budget, self.evidence, self.banned = Budget(0.01), surrogate.evidence, 0
        self.accounting = TrialAccounting(self.budget, surrogate)
        self.step = 0
        for _ in range(4):
            self.run(BASELINE, [100.0] * 2)

    def run(self, candidate: Candidate, durations_us: list[float], *, connects: bool = False) -> None:
        self.budget.earn(10_000.0)
        slots = np.full(len(durations_us), self.evidence.slot(0, candidate))
        logs, steps = np.log(durations_us), np.full(len(durations_us), self.step)
        new = np.zeros(len(slots), np.bool_)
        new[0] = connects
        says = self.accounting.charge(slots, logs, steps, exposed_share=1.0, connects=new)
        self.banned += len(self.accounting.catastrophes())
        if says.any():
            self.evidence.add(self.evidence.calls(slots[says], logs[says]), steps[says])
        self.step += 1


def test_a_connecting_call_that_may_be_slow_by_itself_asks_again_only_once_that_is_earned() -> None:
    job = Job()
    job.run(RING, [500.0], connects=True)
    assert job.accounting.doubted
    job.run(RING, [110.0])
    assert not job.accounting.doubted
    job = Job()
    job.run(RING, [5_000.0], connects=True)
    assert not job.accounting.doubted, "connecting took most of that"
    job = Job()
    job.run(RING, [500.0], connects=True)
    job.run(RING, [500.0])
    assert job.banned == 1


def test_the_second_call_tells_a_slow_setting_from_a_slow_connection() -> None:
    job = Job()
    job.run(RING, [5_000.0, 2_000.0, 2_000.0], connects=True)
    assert job.banned == 1
    job = Job()
    job.run(RING, [5_000.0], connects=True)
    job.run(RING, [2_000.0])
    assert job.banned == 1, "what has connected does not do so again"


def test_a_single_slow_call_bans_unless_it_leaves_a_doubt() -> None:
    job = Job()
    job.run(RING, [300.0])
    assert job.banned == 1, "nothing was connected, and no call has ever straggled"
    job = Job()
    job.run(RING, [300.0], connects=True)
    assert not job.banned
    assert job.accounting.doubted
    job.run(RING, [300.0])
    assert job.banned == 1


def test_a_straggler_is_no_verdict_on_what_was_sane_before() -> None:
    job = Job()
    for _ in range(5):
        job.run(RING, [95.0] * 2)
    job.run(RING, [400.0] * 2)
    job.run(RING, [95.0] * 2)
    job.run(RING, [400.0] * 2)
    assert not job.banned
    job.run(RING, [400.0] * 2)
    assert job.banned == 1
