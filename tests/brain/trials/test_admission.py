"""Which trial may begin, and what it may cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, World, decided, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Protocol,
    size_class,
)
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.learning.policy.acquisition import AcquisitionInput, Option
from zerotune.tuner.learning.policy.risk import Budget
from zerotune.tuner.modeling.correction.baked import UNKNOWN_STD
from zerotune.tuner.modeling.cost_prior import CostPrior
from zerotune.tuner.modeling.features import Floats, Ints

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


@pytest.mark.parametrize("of_its_risk", [0.99, 1.01])
def test_what_a_trial_may_cost_must_be_left_of_the_budget(of_its_risk: float) -> None:
    found = _option(0.0, 0.25)
    assert found is not None
    assert (_option(0.0, 0.25, room_us=of_its_risk * found.risk_us) is not None) == (of_its_risk > 1.0)


def test_risk_is_what_a_trial_costs_on_average() -> None:
    """Not its 90 % bound: few trials are as slow as that, and those that are faster cost nothing."""
    rng = np.random.default_rng(0)
    for slower, doubt in ((0.3, 0.5), (0.0, 0.2), (-0.2, 0.1)):
        found = _option(slower, doubt)
        assert found is not None
        played = np.maximum(np.expm1(slower + doubt * rng.standard_normal(200_000)), 0.0).mean()
        assert found.risk_us == pytest.approx(played * 100.0 * STEPS_AT_RISK, rel=0.05)


class _Line:
    """What an earlier job left of one setting."""

    def __init__(self, key: DecisionKey, candidate: Candidate, median_us: float, *, is_default: bool) -> None:
        self.key, self.candidate, self.is_default = key, candidate, is_default
        self.median_us, self.std_us, self.count = median_us, 0.02 * median_us, 50
        self.level_std = 0.0


class _Shifted:
    """A correction that believes everything to be slower by 0.7 (log), and is sure of it."""

    def predict(
        self, communicator: CommunicatorClass, collective: Collective, candidates: Sequence[Candidate], classes: Ints
    ) -> tuple[Floats, Floats]:
        return np.full((len(classes), len(candidates)), 0.7), np.full((len(classes), len(candidates)), 0.1)

    def nearest(self, communicator: CommunicatorClass) -> CommunicatorClass:
        return communicator


def test_what_no_earlier_run_has_measured_is_as_doubtful_as_without_a_model_where_trials_are_chosen() -> None:
    machine = fabric.load("ethernet_boxes")
    place, kind = machine.communicator(range(16)), Collective.all_gather
    key = DecisionKey(place, kind, Phase.other, size_class(1 << 20))
    measured, new = Candidate(Algorithm.ring, Protocol.ll, 4), Candidate(Algorithm.pat, Protocol.simple, 4)
    knowledge = Knowledge([_Line(key, measured, 100.0, is_default=False)], _Shifted())
    costs = CostPrior(machine.describe())
    asked = (place, kind, (measured, new), np.array([1e6]), np.array([key.size_class]), costs)
    usual_means, usual_stds = knowledge.guess(*asked)
    means, stds = knowledge.guess(*asked, carries_over=False)
    assert usual_stds[0].tolist() == [0.1, 0.1]
    assert stds[0].tolist() == [0.1, UNKNOWN_STD]
    assert (usual_means - means)[0].tolist() == pytest.approx([0.0, 0.7])
    nobody_measured = Knowledge((), _Shifted())
    assert nobody_measured.guess(*asked, carries_over=False)[1][0].tolist() == [0.1, 0.1]


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


def test_what_would_connect_something_must_have_earned_that_as_well() -> None:
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
