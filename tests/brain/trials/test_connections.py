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
    Phase,
    Protocol,
    StepRecord,
)
from zerotune.tuner.learning.brain import Brain

RING, TREE = (Candidate(algorithm, Protocol.simple, 4) for algorithm in (Algorithm.ring, Algorithm.tree))
PLACE = CommunicatorClass(8, 1)


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
def test_what_is_twice_as_fast_is_had_although_its_first_call_is_slow(
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
def test_what_connecting_cost_is_charged(calls_show_it: bool) -> None:
    """Where there is nothing to gain, nothing pays it back, and it is overdrawn once."""
    world = ConnectingWorld("h100_node", PLACE, _calls(), compute_us=1_000.0, calls_show_it=calls_show_it, seed=33)
    brain = make_brain(world)
    play(world, brain, 400)
    assert world.lost_us == 20_000.0
    assert brain.budget.spent_us == pytest.approx(world.lost_us, rel=0.2)
    assert brain.budget.remaining_us < 0


@pytest.mark.parametrize("n_calls", [1, 3])
def test_what_the_first_step_of_a_job_connects_makes_nothing_else_seem_fast(n_calls: int) -> None:
    for seed in range(34, 36):
        world = ConnectingWorld(
            "h100_node", PLACE, _calls(n_calls), compute_us=1_000.0, begins_connected=False, seed=seed
        )
        world.calls += [Call(Collective.all_gather, Phase.forward_gather, 1 << 23)] * n_calls
        brain = make_brain(world)
        play(world, brain, 200)
        assert not [one for one in brain.decisions() if one.kind == "promote"]
