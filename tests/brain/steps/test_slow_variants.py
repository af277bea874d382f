"""A plan on trial of which calls are catastrophically slow ends at once, and those settings do not come back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from benchmarks.lib.brain_world import Call, World, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Candidate, Collective, Phase
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.policy.steps.step_trial import StepTrials, Variant

CALLS = [Call(kind, Phase.other, 1 << 22) for kind in (Collective.all_gather, Collective.reduce_scatter)]


@dataclass
class WorldOfSlowPlans(World):
    """Calls of `slow` take `ratio` times as long as those of NCCL's choice."""

    slow: Candidate | None = None
    ratio: float = 3.0

    def truth(self, call: Call, candidate: Candidate) -> tuple[float, Candidate]:
        us, ran = super().truth(call, candidate)
        usual_us = super().truth(call, BASELINE)[0]
        return (self.ratio * usual_us if candidate == self.slow else us), ran


def _play_a_variant(ratio: float, n_calls: int) -> tuple[WorldOfSlowPlans, Brain, Candidate, int]:
    """A settled job with a variant on trial: the world, the brain, what the variant runs, and in how many steps."""
    place = fabric.load("h100_node").communicator(range(8))
    world = WorldOfSlowPlans("h100_node", place, CALLS * n_calls, ratio=ratio, seed=3)
    brain = make_brain(world)
    play(world, brain, 100)
    while brain._policy.trials or brain._oversight.is_comparing:
        play(world, brain, 1)
    state = next(one for one in brain._states if one.key.collective is Collective.all_gather)
    options = brain._outlook.fields.of(state).options
    usual = world.setting(CALLS[0], state.incumbent)
    new = [one for one in options if brain._regimes.evidence.find(state.index, one) is None]
    fewer = [one for one in new if one.protocol is usual.protocol and 0 < one.n_channels < usual.n_channels]
    world.slow = max(fewer, key=lambda one: one.n_channels)
    brain.decisions()
    variant = Variant("fewer channels", {state.index: world.slow}, world.slow.n_channels)
    brain._oversight._variants._trials.begin(variant, world.step, 0.005, 1e9)
    n_ran = 0
    for _ in range(60):
        play(world, brain, 1)
        n_ran += world.chosen(CALLS[0]) == world.slow
    return world, brain, world.slow, n_ran


@pytest.mark.parametrize("n_calls", [1, 4])
def test_calls_that_are_catastrophically_slow_end_a_plan_on_trial_at_once(n_calls: int) -> None:
    _, brain, slow, n_ran = _play_a_variant(3.0, n_calls)
    # One call may have connected something: two must agree.
    assert 1 <= n_ran <= (2 if n_calls == 1 else 1)
    state = next(one for one in brain._states if slow in one.banned)
    assert state.key.collective is Collective.all_gather
    assert _ended_by_calls(brain) == [True]


def test_calls_that_are_only_slower_are_left_to_steps() -> None:
    _, brain, slow, n_ran = _play_a_variant(1.5, 4)
    assert n_ran > 1
    assert not any(slow in one.banned for one in brain._states)
    assert not any(_ended_by_calls(brain))


def _ended_by_calls(brain: Brain) -> list[bool]:
    """By variant that ended, whether calls spoke against it."""
    return ["times as long with it" in one.reason for one in brain.decisions() if one.kind == "variant"]


def test_what_comes_first_is_charged_too() -> None:
    trials = StepTrials()
    variant = Variant("at most 4 channels", {}, 4)
    trials.begin(variant, 0, 0.005, 1000.0)
    assert trials.step(1400.0, is_on=True)[0] == pytest.approx(400.0)
    trials.end(1)
    assert trials.late_us(1300.0) == pytest.approx(300.0)
    trials.begin(variant, 2)
    assert trials.step(1400.0, is_on=True)[0] == 0.0, "nobody knows what steps take"
    assert trials.step(1000.0, is_on=False)[0] == 0.0
    assert trials.step(1400.0, is_on=True)[0] == pytest.approx(400.0)
    assert math.isinf(StepTrials()._usual_us)
