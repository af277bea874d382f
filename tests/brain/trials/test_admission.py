"""Which trial may begin, and what it may cost."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, World, decided, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    Phase,
    Protocol,
)
from zerotune.tuner.learning.policy.acquisition import AcquisitionInput, Option
from zerotune.tuner.learning.policy.risk import Budget

TRIED = Candidate(Algorithm.ring, Protocol.ll, 4)
STEPS_AT_RISK = 3.0


def _option(
    slower: float,
    doubt: float,
    *,
    room_us: float = 1e9,
) -> Option | None:
    """What may begin where the only candidate is believed to be slower by so much (log), give or take `doubt`."""
    posterior = np.array([math.log(100.0), math.log(100.0) + slower]), np.array([1e-3, doubt])
    case = AcquisitionInput((BASELINE, TRIED), posterior, BASELINE, math.log(100.0), room_us, 1.0, STEPS_AT_RISK)
    return case.best(lambda candidate: candidate == TRIED, ())


def test_risk_is_what_a_trial_costs_on_average() -> None:
    """Not its 90 % bound: few trials are as slow as that, and those that are faster cost nothing."""
    rng = np.random.default_rng(0)
    for slower, doubt in ((0.3, 0.5), (0.0, 0.2), (-0.2, 0.1)):
        found = _option(slower, doubt)
        assert found is not None
        played = np.maximum(np.expm1(slower + doubt * rng.standard_normal(200_000)), 0.0).mean()
        assert found.risk_us == pytest.approx(played * 100.0 * STEPS_AT_RISK, rel=0.05)


@pytest.mark.parametrize(
    ("collective", "message_bytes"), [(Collective.all_gather, 1 << 16), (Collective.reduce_scatter, 1 << 22)]
)
def test_a_job_of_one_key_does_not_wait_for_a_hundred_steps(collective: Collective, message_bytes: int) -> None:
    place = fabric.load("ethernet_boxes").communicator(range(16))
    call = Call(collective, Phase.other, message_bytes)
    world = World("ethernet_boxes", place, [call], seed=3, compute_us=0.0)
    world.compute_us = 2.3 * world.truth(call, BASELINE)[0]
    brain = make_brain(world)
    play(world, brain, 60)
    assert any(decision.kind == "explore" for decision in brain.decisions())
    play(world, brain, 140)
    assert brain.spent_percent <= 1.0


def test_a_trial_that_connects_waits_until_that_is_earned_too() -> None:
    """NCCL's own choice takes 100 us, what is tried should take 80, and connecting it 5 ms."""

    def begins(once_us: float, in_all_us: float) -> Option | None:
        posterior = np.array([math.log(100.0), math.log(80.0)]), np.array([1e-3, 0.1])
        once = np.array([0.0, once_us])
        case = AcquisitionInput(
            (BASELINE, TRIED), posterior, BASELINE, math.log(100.0), 1e3, 1.0, 1.0, once_us=once, in_all_us=in_all_us
        )
        return case.best(lambda candidate: candidate == TRIED, ())

    assert begins(0.0, 1e3) is not None
    assert begins(5e3, 1e3) is None
    found = begins(5e3, 6e3)
    assert found is not None, "more than 200 steps earn, but not more than all"
    assert found.once_us == 5e3


def test_the_budget_is_that_of_all_steps_and_of_any_200_in_a_row() -> None:
    budget = Budget(0.01)
    for _ in range(1000):
        budget.earn(1000.0)
    assert budget.in_all_us == pytest.approx(10_000.0)
    assert budget.remaining_us == pytest.approx(2_000.0, rel=0.01)
    budget.spend(5_000.0)
    assert budget.remaining_us == pytest.approx(-3_000.0, rel=0.01)
    for _ in range(199):
        budget.earn(1000.0)
    assert budget.remaining_us < 0.0
    for _ in range(2):
        budget.earn(1000.0)
    assert budget.remaining_us == pytest.approx(2_000.0, rel=0.02), "the surprise is out of the window, and paid for"


def test_a_phase_that_fills_steps_follows_what_the_other_phase_found() -> None:
    place = fabric.load("ethernet_boxes").communicator(range(2))
    forward = Call(Collective.all_gather, Phase.forward_gather, 800_000)
    backward = Call(Collective.all_gather, Phase.backward_gather, 800_000)
    world = World("ethernet_boxes", place, [forward] * 3 + [backward], seed=2, compute_us=300.0)
    brain = make_brain(world)
    play(world, brain, 400, latency_steps=9)
    chosen = decided(brain)
    assert not chosen(backward).is_baseline
    assert chosen(forward) == chosen(backward)
