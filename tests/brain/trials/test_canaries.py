"""What a book of the fleet says is tried first, and believed of nothing: a poisoned one costs the budget at most."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
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
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.cost_prior import CostPrior

PLACE = fabric.load("ethernet_boxes").communicator(range(16))
CALLS = [
    call
    for exponent in range(16, 26)
    for call in [Call(Collective.all_gather, Phase.forward_gather, 1 << exponent)] * 2
    + [Call(Collective.reduce_scatter, Phase.gradient_scatter, 1 << exponent)]
]
Choose = Callable[[World, Call, tuple[Candidate, ...]], tuple[Candidate, float, float]]

USED = ("promote", "provisional", "prior")


def _key(call: Call) -> DecisionKey:
    return DecisionKey(PLACE, call.collective, call.phase, size_class(call.message_bytes))


def _playing(choose: Choose, *, seed: int = 0, n_steps: int = 300) -> tuple[World, Brain, dict[DecisionKey, Candidate]]:
    world = World("ethernet_boxes", PLACE, CALLS, seed=seed, compute_us=100_000.0)
    costs = CostPrior(fabric.load("ethernet_boxes").describe())
    told = {_key(call): choose(world, call, costs.candidates(PLACE, call.collective)) for call in CALLS}
    brain = make_brain(world, Knowledge().with_recommendations(told, "the fleet's book"))
    play(world, brain, n_steps)
    return world, brain, {key: candidate for key, (candidate, _, _) in told.items()}


def _best(world: World, call: Call, offered: tuple[Candidate, ...]) -> tuple[Candidate, float, float]:
    best = min(offered, key=lambda one: world.truth(call, one)[0])
    return best, math.log(world.truth(call, BASELINE)[0] / world.truth(call, best)[0]), 0.005


def test_the_winner_in_the_book_is_tried_first() -> None:
    world = World("ethernet_boxes", PLACE, CALLS, seed=1, compute_us=100_000.0)
    costs = CostPrior(fabric.load("ethernet_boxes").describe())
    told = {_key(call): _best(world, call, costs.candidates(PLACE, call.collective)) for call in CALLS}
    told = {key: one for key, one in told.items() if one[1] > 0.02}
    assert told, "something is to be gained on this fabric"
    brain = make_brain(world, Knowledge().with_recommendations(told, "the fleet's book"))
    plans = play(world, brain, 10)
    explored = [one for one in brain.decisions() if one.kind == "explore"]
    assert len(explored) > 4, "one at first, then others"
    assert all(one.candidate == told[one.key][0] for one in explored)
    (first,) = plans[0].rows
    assert first.candidate == explored[0].candidate
    assert explored[0].step <= 5


def test_the_first_plan_is_the_books_however_late_it_comes() -> None:
    """Own guesses that promise more begin after it, though enough steps are known for them by then."""
    two = fabric.load("ethernet_boxes").communicator(range(2))
    calls = [
        Call(collective, phase, n_bytes)
        for n_bytes in (100_000, 200_000)
        for collective, phase in (
            (Collective.all_gather, Phase.forward_gather),
            (Collective.all_gather, Phase.backward_gather),
            (Collective.reduce_scatter, Phase.gradient_scatter),
        )
    ]
    world = World("ethernet_boxes", two, calls, seed=1, compute_us=20_000.0)
    won = Candidate(Algorithm.ring, Protocol.simple, 2)
    told = {
        DecisionKey(two, call.collective, call.phase, size_class(call.message_bytes)): (won, 0.3, 0.01)
        for call in calls
    }
    brain = make_brain(world, Knowledge().with_recommendations(told, "the fleet's book"))
    play(world, brain, 60, looks_every=30)
    explored = [one for one in brain.decisions() if one.kind == "explore"]
    first_by_key = {one.key: one.candidate for one in reversed(explored)}
    assert set(first_by_key.values()) == {won}
    assert {one.candidate for one in explored} > {won}


def _slowest(world: World, call: Call, offered: tuple[Candidate, ...]) -> tuple[Candidate, float, float]:
    return max(offered, key=lambda one: world.truth(call, one)[0]), math.log(50.0), 0.0


def _absurd(world: World, call: Call, offered: tuple[Candidate, ...]) -> tuple[Candidate, float, float]:
    return Candidate(Algorithm.nvls_tree, Protocol.ll, 64), 4.9, 0.0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("poison", [_slowest, _absurd])
def test_a_poisoned_book_costs_the_budget_at_most(poison: Choose, seed: int) -> None:
    _, brain, told = _playing(poison, seed=seed)
    assert brain.spent_percent <= 1.0
    promoted = {(one.key, one.candidate) for one in brain.decisions() if one.kind in USED}
    assert not promoted & set(told.items())


def test_own_measurements_win_over_a_book() -> None:
    call = CALLS[0]
    bad, good = Candidate(Algorithm.ring, Protocol.ll, 2), Candidate(Algorithm.ring, Protocol.simple, 4)

    class Line:
        def __init__(self, candidate: Candidate, median_us: float, *, is_default: bool = False) -> None:
            self.key, self.candidate, self.median_us, self.is_default = _key(call), candidate, median_us, is_default
            self.count, self.std_us, self.level_std = 100, 1.0, 0.0

    told = {_key(call): (bad, 0.5, 0.0)}
    slower = [Line(BASELINE, 100.0, is_default=True), Line(bad, 120.0)]
    assert Knowledge(slower, by_job=[slower]).with_recommendations(told, "the fleet's book").canary(_key(call)) is None
    proven = [Line(BASELINE, 100.0, is_default=True), Line(good, 80.0)]
    assert Knowledge(proven, by_job=[proven]).with_recommendations(told, "the fleet's book").canary(_key(call)) is None
    assert Knowledge().with_recommendations(told, "the fleet's book").canary(_key(call)) is not None
    other = DecisionKey(CommunicatorClass(8, 1), *(_key(call).collective, _key(call).phase, _key(call).size_class))
    assert Knowledge().with_recommendations(told, "the fleet's book").canary(other) is None
