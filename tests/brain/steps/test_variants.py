"""Variants of the plan: fewer channels train faster where computation needs them, and are left alone where not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import (
    Call,
    OverlappedWorld,
    SeeminglyHidden,
    World,
    decided,
    make_brain,
    play,
)
from benchmarks.lib.simulated.earlier_jobs import key_of
from zerotune.agent.nccl import fabric
from zerotune.store.records import (
    BASELINE,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Plan,
)
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.policy.change_detection import Regimes
from zerotune.tuner.learning.policy.choice import Event, Policy
from zerotune.tuner.learning.policy.keys import CandidateTables, KeyState
from zerotune.tuner.learning.policy.memory import MemoryGate
from zerotune.tuner.learning.policy.plans import PlanInForce, Variant
from zerotune.tuner.learning.policy.risk import Budget
from zerotune.tuner.learning.policy.step_effects import Shared, StepEffects
from zerotune.tuner.learning.policy.surrogate import Surrogate
from zerotune.tuner.learning.policy.variants import Variants
from zerotune.tuner.modeling.features import CostPrior

GATHER, SCATTER = Collective.all_gather, Collective.reduce_scatter
KINDS = ((GATHER, Phase.forward_gather), (SCATTER, Phase.gradient_scatter))


def _hidden_job(sizes: tuple[int, ...] = (22, 24), compute_us: float = 40_000.0) -> tuple[OverlappedWorld, Brain]:
    """A job whose collectives hide behind computation that their channels slow down."""
    place = fabric.load("few_sms_node").communicator(range(8))
    calls = [Call(kind, phase, 1 << exponent) for exponent in sizes for kind, phase in KINDS for _ in range(3)]
    world = OverlappedWorld("few_sms_node", place, calls, compute_us=compute_us)
    return world, make_brain(world)


def _seemingly_hidden(name: str, sizes: tuple[int, ...], *, seed: int = 1, compute: float = 2.3) -> SeeminglyHidden:
    """A job in which variants are tried for nothing; it computes for `compute` times as long as its calls take."""
    machine = fabric.load(name)
    calls = [Call(kind, phase, 1 << exponent) for exponent in sizes for kind, phase in KINDS for _ in range(2)]
    world = SeeminglyHidden(name, machine.communicator(range(min(16, machine.max_ranks))), calls, seed=seed)
    world.compute_us = compute * _calls_us(world)
    return world


def _calls_us(world: World, runs: Callable[[Call], Candidate] = lambda _: BASELINE) -> float:
    return sum(world.truth(call, runs(call))[0] for call in world.calls)


def test_fewer_channels_are_adopted_where_computation_needs_them_and_bound_later_trials() -> None:
    world, brain = _hidden_job()
    default_us = np.median([world.run_step()[1].duration_us for _ in range(20)])
    cap_of: dict[DecisionKey, int] = {}
    n_adopted = 0
    for _ in range(400):
        for one in brain.keys:
            cap_of[one.key] = one.max_channels
        play(world, brain, 1)
        for one in brain.decisions():
            n_adopted += one.kind == "variant"
            if one.kind == "explore":
                assert one.candidate.n_channels <= cap_of[one.key]
    assert n_adopted
    assert brain.spent_percent <= 1.0
    assert any(one.max_channels < 16 for one in brain.keys)
    assert all(one.n_channels <= one.max_channels for one in brain.keys)
    world.fixed = decided(brain)
    assert np.median([world.run_step()[1].duration_us for _ in range(20)]) < 0.98 * default_us


@pytest.mark.parametrize("compute", [0.3, 1.0])
def test_what_may_lose_a_tenth_of_the_step_is_not_tried_whatever_it_may_gain(compute: float) -> None:
    losses = []
    for name, sizes in (("few_sms_node", (22, 24)), ("h100_node", (22, 24)), ("ethernet_boxes", (17, 20, 23))):
        world = _seemingly_hidden(name, sizes, compute=compute)
        brain = make_brain(world)
        for _ in range(200):
            play(world, brain, 1)
            if brain.plan is not None and brain.plan.has_variant:
                usual_us = world.compute_us + _calls_us(world, decided(brain))
                losses.append((world.compute_us + _calls_us(world, world.chosen)) / usual_us - 1.0)
    assert losses
    assert max(losses) < 0.1


@pytest.mark.slow
def test_where_channels_cost_nothing_and_all_settings_are_alike_none_is_adopted() -> None:
    place = fabric.load("h100_node").communicator(range(8))
    calls = [Call(kind, phase, 1 << 22) for kind, phase in ((GATHER, Phase.forward_gather), (SCATTER, Phase.other))] * 4
    for seed in range(6):
        world = World("h100_node", place, calls, compute_us=5_000.0, seed=seed, flat=True)
        brain = make_brain(world)
        play(world, brain, 200)
        assert all(decided(brain)(call).is_baseline for call in calls)


def _play_a_variant(ratio: float, n_calls: int) -> tuple[Brain, set[tuple[DecisionKey, Candidate]], int]:
    """A settled job with a variant on trial, of which what never ran takes that many times as long as NCCL's choice.

    The brain, what never ran, and in how many steps it ran then.
    """
    place = fabric.load("h100_ib_16").communicator(range(16))
    calls = [Call(*kind, 1 << 18) for kind in KINDS]
    world = SeeminglyHidden("h100_ib_16", place, calls * n_calls, seed=3)
    world.compute_us = 2.3 * _calls_us(world)
    brain = make_brain(world)
    while brain.variant is None:
        assert world.step < 400
        play(world, brain, 1)
    brain.decisions()
    slow = {(key, one) for key, one in brain.variant.settings.items() if not brain.predicted(key)[one].n_calls}
    assert slow
    for call in calls:
        for key, one in slow:
            if key == key_of(world, call):
                world.factors[call, one] = ratio * world.truth(call, BASELINE)[0] / world.truth(call, one)[0]
    n_ran = 0
    for _ in range(60):
        play(world, brain, 1)
        n_ran += any((key_of(world, call), world.chosen(call)) in slow for call in calls)
    return brain, slow, n_ran


@pytest.mark.parametrize("n_calls", [1, 4])
def test_calls_that_are_catastrophically_slow_end_a_plan_on_trial_at_once(n_calls: int) -> None:
    brain, slow, n_ran = _play_a_variant(3.0, n_calls)
    # One call may have connected something: two must agree.
    assert 1 <= n_ran <= (2 if n_calls == 1 else 1)
    assert slow & {(one.key, candidate) for one in brain.keys for candidate in one.banned}
    assert "variant" in [one.kind for one in brain.decisions()]


# ---- one variant's trial alone, over many seeds -------------------------------------------------------------

VARIANT = Variant("at most 4 channels", {0: Candidate()})


class Trial:
    """One variant on trial over steps of 10 ms: it ends as `is_better` says."""

    def __init__(self) -> None:
        self.budget = Budget(0.01)
        self.budget.earn(1e9)
        self.events: list[Event] = []
        surrogate = Surrogate(CandidateTables(CostPrior({})), Regimes())
        policy = Policy(surrogate, self.budget, MemoryGate(0.92), self.events.append)
        key = DecisionKey(CommunicatorClass(8, 1), GATHER, Phase.forward_gather, 88)
        state = KeyState(0, key, 1 << 22)
        surrogate.tables.register(state)
        policy.register(state)
        self.effects = StepEffects()
        self.variants = Variants(policy, self.effects, self.events.append)
        self.n_on = 0

    def run(self, step_us: Callable[[bool], float], n_before: int = 60) -> bool | None:
        """Steps without it, and then its trial; None without a verdict."""
        for _ in range(n_before):
            self.effects.step(math.log(step_us(False)), {})
        self.variants.begin(VARIANT, 0, 10_000.0)
        for step in range(1, 400):
            is_on = self.variants.running is not None
            self.n_on += is_on
            duration_us = step_us(is_on)
            self.effects.step(math.log(duration_us), {Shared.variant: 1.0} if is_on else {})
            plan = PlanInForce([], np.zeros(0, np.bool_), Plan(1), VARIANT if is_on else None)
            if self.variants.judge(plan, step, duration_us):
                return any(one.kind == "rollback" for one in self.events)  # it goes back to the baseline
        return None


@pytest.mark.parametrize("seed", range(20))
def test_scattered_steps_adopt_no_variant(seed: int) -> None:
    """How far they scatter is known from before: a few that happen to agree are no proof."""
    chance = np.random.default_rng(seed)
    lengths_us = 10_000.0 * np.array([1.0, 1.0, 0.75, 0.6, 0.85])
    assert not Trial().run(lambda _: float(chance.choice(lengths_us)))
