"""Variants of the plan: fewer channels train faster where computation needs them, and are left alone where not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import (
    Call,
    OverlappedWorld,
    SeeminglyHidden,
    World,
    decided,
    gain_share,
    make_brain,
    play,
)
from benchmarks.lib.simulated.earlier_jobs import key_of, lines, offer_only
from zerotune.agent.nccl import fabric
from zerotune.agent.nccl.catalog import CHANNEL_LADDER
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
)
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.learning.policy.change_detection import Regimes
from zerotune.tuner.learning.policy.choice import NEVER_STEP, Event, Policy
from zerotune.tuner.learning.policy.keys import CandidateTables, KeyState
from zerotune.tuner.learning.policy.memory import MemoryGate
from zerotune.tuner.learning.policy.plans import PlanInForce, Variant
from zerotune.tuner.learning.policy.risk import Budget
from zerotune.tuner.learning.policy.step_effects import Shared, StepEffects
from zerotune.tuner.learning.policy.surrogate import Surrogate
from zerotune.tuner.learning.policy.variants import Variants
from zerotune.tuner.modeling.cost_prior import CostPrior

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


def test_each_group_is_asked_about_alone_and_not_together_where_all_were_slower() -> None:
    world = _seemingly_hidden("ethernet_boxes", (17, 20, 23))
    brain, asked = make_brain(world), set()
    for _ in range(400):
        play(world, brain, 1)
        if brain.variant is not None:
            asked.add(frozenset((key.collective, key.phase) for key in brain.variant.settings))
    assert asked == {frozenset([kind]) for kind in KINDS}


def test_a_variant_that_may_lose_a_tenth_of_a_step_is_not_tried() -> None:
    losses = []
    for name, sizes in (("few_sms_node", (22, 24)), ("h100_node", (22, 24)), ("ethernet_boxes", (17, 20, 23))):
        world = _seemingly_hidden(name, sizes, compute=0.3)
        brain = make_brain(world)
        for _ in range(200):
            play(world, brain, 1)
            if brain.plan is not None and brain.plan.has_variant:
                usual_us = world.compute_us + _calls_us(world, decided(brain))
                losses.append((world.compute_us + _calls_us(world, world.chosen)) / usual_us - 1.0)
    assert losses
    assert max(losses) < 0.1


def test_a_cap_that_comes_before_any_trial_leaves_its_keys_to_what_it_allows() -> None:
    """Nothing says that the setting it fell back to is the best within it."""
    place = fabric.load("few_sms_node").communicator(range(8))
    call = Call(Collective.all_reduce, Phase.gradient_scatter, 1 << 24)
    world = OverlappedWorld("few_sms_node", place, [call] * 6, compute_us=30_000.0)
    fallback, fewer, more = (
        Candidate(*one)
        for one in (
            (Algorithm.tree, Protocol.simple, 16),
            (Algorithm.ring, Protocol.simple, 16),
            (Algorithm.ring, Protocol.ll128, 24),
        )
    )
    brain = make_brain(world, Knowledge(lines(world, {(call, fallback): -0.3})))
    offers = offer_only(world, brain, fallback)
    play(world, brain, 1)
    while brain.keys[0].incumbent != fallback:
        assert world.step < 200
        play(world, brain, 1)
    assert not brain.keys[0].tried
    offers.change(fallback, fewer, more)
    for better in (fewer, more):
        world.factors[call, better] = 0.5 * world.truth(call, fallback)[0] / world.truth(call, better)[0]
    play(world, brain, 100)
    assert brain.keys[0].tried == (fewer,)


@pytest.mark.slow
def test_gathers_that_are_waited_for_end_with_other_settings_than_hidden_ones_of_the_same_size() -> None:
    place = fabric.load("few_sms_node").communicator(range(8))
    kinds = [(GATHER, Phase.forward_gather), (GATHER, Phase.post_step_gather), (SCATTER, Phase.gradient_scatter)]
    calls = [Call(kind, phase, 1 << exponent) for exponent in (22, 24, 26) for kind, phase in kinds for _ in range(3)]
    world = OverlappedWorld(
        "few_sms_node", place, calls, compute_us=40_000.0, waited_for=frozenset({Phase.forward_gather})
    )
    brain = make_brain(world)
    play(world, brain, 800)
    chosen = decided(brain)
    for exponent in (24, 26):
        forward, after = (
            world.truth(call, chosen(call))[1].n_channels
            for call in (Call(GATHER, phase, 1 << exponent) for _, phase in kinds[:2])
        )
        assert after <= 16 < forward
    assert brain.spent_percent <= 1.0


@dataclass
class Periodic(SeeminglyHidden):
    """Every so many steps' computation takes longer."""

    period: int = 4
    longer: float = 0.1

    def run_step(self) -> tuple[np.ndarray, StepRecord]:
        usual_us = self.compute_us
        self.compute_us *= 1.0 + self.longer * (self.step % self.period == self.period - 1)
        block, record = super().run_step()
        self.compute_us = usual_us
        return block, record


@pytest.mark.parametrize("period", [2, 3, 6])
def test_longer_steps_that_come_again_are_no_variants_doing(period: int) -> None:
    """Nothing computes beside calls here: a variant has slower calls, and that is all."""
    place = fabric.load("ethernet_boxes").communicator(range(16))
    calls = [Call(kind, phase, 1 << exponent) for exponent in (17, 20, 23) for kind, phase in KINDS] * 2
    n_with = 0
    for seed in range(2):
        world = Periodic("ethernet_boxes", place, calls, seed=seed, period=period)
        world.compute_us = 2.3 * _calls_us(world)
        brain = make_brain(world)
        for _ in range(250):
            play(world, brain, 1)
            n_with += brain.plan is not None and brain.plan.has_variant
        baseline_us, _, ours_us = map(sum, zip(*gain_share(world, brain).values(), strict=True))
        assert ours_us <= baseline_us
        assert {one.max_channels for one in brain.keys} == {CHANNEL_LADDER[-1]}, "no variant was adopted"
    assert n_with


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


def test_calls_that_are_only_slower_are_left_to_steps() -> None:
    brain, slow, n_ran = _play_a_variant(1.5, 4)
    assert n_ran
    assert not slow & {(one.key, candidate) for one in brain.keys for candidate in one.banned}
    assert "variant" in [one.kind for one in brain.decisions()]
    assert brain.budget.spent_us > 0.0


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


def test_a_variant_is_found_beside_stragglers() -> None:
    """Each tenth step takes twenty times as long, whatever runs."""
    n_found = 0
    for seed in range(20):
        chance, steps = np.random.default_rng(seed), itertools.count()

        def step_us(is_on: bool, chance: np.random.Generator = chance, steps: Iterator[int] = steps) -> float:
            straggles = 20.0 if next(steps) % 10 == 9 else 1.0
            return straggles * 10_000.0 * math.exp(chance.normal(0.0, 0.01) - 0.03 * is_on)

        n_found += bool(Trial().run(step_us))
    assert n_found >= 15


@pytest.mark.parametrize("gain", [0.02, -0.02])
@pytest.mark.parametrize("checkpoint_at", [63, 64, 66])
def test_a_checkpoint_while_a_variant_is_on_trial_neither_decides_about_it_nor_ends_exploring(
    checkpoint_at: int, gain: float
) -> None:
    n_adopted = 0
    for seed in range(5):
        chance, steps, trial = np.random.default_rng(seed), itertools.count(), Trial()

        def step_us(is_on: bool, chance: np.random.Generator = chance, steps: Iterator[int] = steps) -> float:
            usual_us = 10_000.0 * math.exp(chance.normal(0.0, 0.005) - gain * is_on)
            return 6e7 if next(steps) == checkpoint_at else usual_us

        n_adopted += bool(trial.run(step_us))
        assert trial.budget.spent_us < 10_000.0
    assert n_adopted >= 4 if gain > 0.0 else not n_adopted


def test_a_variant_that_is_truly_slow_is_charged_and_does_not_come_back() -> None:
    chance, trial = np.random.default_rng(0), Trial()
    assert trial.run(lambda is_on: 10_000.0 * math.exp(chance.normal(0.0, 0.005) + 0.2 * is_on)) is False
    assert trial.budget.spent_us == pytest.approx(trial.n_on * 10_000.0 * math.expm1(0.2), rel=0.2)
    assert trial.variants.cooldown.until(VARIANT.name) >= NEVER_STEP
    spent_us = trial.budget.spent_us
    trial.variants.charge_late()
    assert trial.budget.spent_us == pytest.approx(spent_us + 10_000.0 * math.expm1(0.2), rel=0.2)
