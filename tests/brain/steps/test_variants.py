"""Variants of the plan: fewer channels train faster where computation needs them, and are left alone where not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from benchmarks.lib.brain_world import Call, OverlappedWorld, World, decided, gain_share, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import (
    BASELINE,
    Candidate,
    Collective,
    Phase,
    Plan,
    StepRecord,
)
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.policy.choice import NEVER_STEP
from zerotune.tuner.learning.policy.plans import PlanInForce, Variant
from zerotune.tuner.learning.policy.step_effects import Load, StepEffects, group_of
from zerotune.tuner.learning.policy.variants import AGAIN_AFTER_STEPS, ARM

GATHER, SCATTER = Collective.all_gather, Collective.reduce_scatter
KINDS = ((GATHER, Phase.forward_gather), (SCATTER, Phase.gradient_scatter))


def _hidden_job(sizes: tuple[int, ...] = (22, 24), compute_us: float = 40_000.0) -> tuple[OverlappedWorld, Brain]:
    """A job whose collectives hide behind computation that their channels slow down."""
    place = fabric.load("few_sms_node").communicator(range(8))
    calls = [Call(kind, phase, 1 << exponent) for exponent in sizes for kind, phase in KINDS for _ in range(3)]
    world = OverlappedWorld("few_sms_node", place, calls, compute_us=compute_us)
    return world, make_brain(world)


def _begin(brain: Brain, variant: Variant, step: int) -> None:
    step_feedback = brain._step_feedback
    step_feedback._variants.begin(variant, step, 1e9, step_feedback._guarded.effects)


def test_fewer_channels_are_adopted_where_computation_needs_them_and_bound_later_trials() -> None:
    world, brain = _hidden_job()
    default_us = np.median([world.run_step()[1].duration_us for _ in range(20)])
    play(world, brain, 400)
    decisions = brain.decisions()
    assert any(one.kind == "variant" for one in decisions)
    assert brain.spent_percent <= 1.0
    capped = [state for state in brain._states if state.max_channels < 16]
    assert capped
    for state in capped:
        assert state.n_channels <= state.max_channels
        options = brain._surrogate.fields.of(state).options
        assert not any(
            brain._policy.options.may_try(state, one) for one in options if one.n_channels > state.max_channels
        )
    world.fixed = decided(brain)
    assert np.median([world.run_step()[1].duration_us for _ in range(20)]) < 0.98 * default_us


def test_variants_are_asked_about_for_all_and_for_each_group_alone() -> None:
    world, brain = _hidden_job()
    variants, evidence = brain._step_feedback._variants, brain._regimes.evidence
    play(world, brain, 30)
    assert not [*variants._look_for_settings(brain._states, evidence, 40_000.0)]
    found = [*variants._variants(brain._states, evidence, 40_000.0)]
    groups = {group_of(state) for state in brain._states}
    assert {frozenset(variant.loads) for variant in found} == {frozenset(groups), *(frozenset({one}) for one in groups)}
    for variant in found:
        assert set(variant.changes) <= {state.index for state in brain._states if group_of(state) in variant.loads}


@pytest.mark.parametrize("extra_share", [0.2, 0.5])
def test_what_may_lose_a_tenth_of_the_step_is_not_tried_whatever_it_may_gain(extra_share: float) -> None:
    world, brain = _hidden_job()
    play(world, brain, 30)
    variants, step_us = brain._step_feedback._variants, 40_000.0
    held_us = -step_us * 40.0 * extra_share
    state = brain._states[0]
    variant = Variant("some", {state.index: state.incumbent}, {group_of(state): Load(extra_share * step_us, held_us)})
    assert variants._worth(variant, 10_000, step_us, 0.01) == 0.0


def test_a_cap_that_comes_before_any_trial_leaves_its_keys_to_what_it_allows() -> None:
    """Nothing says that the setting it fell back to is the best within it."""
    place = fabric.load("ethernet_boxes").communicator(range(2))
    world = World("ethernet_boxes", place, [Call(GATHER, Phase.forward_gather, 132_352)] * 3, compute_us=150.0, seed=1)
    brain = make_brain(world)
    play(world, brain, 8)
    (state,) = brain._states
    assert not state.n_tried
    fallback = next(one for one in brain._surrogate.fields.of(state).options if one.n_channels == 4)
    brain._step_feedback._variants._adopt(Variant("cap", {0: fallback}), 0.1, brain._states)
    assert state.incumbent == fallback
    play(world, brain, 200)
    assert state.n_tried
    assert all(one.n_channels <= 4 for one in state.numbers)


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


def test_where_channels_cost_nothing_and_all_settings_are_alike_none_is_adopted() -> None:
    place = fabric.load("h100_node").communicator(range(8))
    calls = [Call(kind, phase, 1 << 22) for kind, phase in ((GATHER, Phase.forward_gather), (SCATTER, Phase.other))] * 4
    for seed in range(6):
        world = World("h100_node", place, calls, compute_us=5_000.0, seed=seed, flat=True)
        brain = make_brain(world)
        play(world, brain, 200)
        assert all(decided(brain)(call).is_baseline for call in calls)


@dataclass
class Periodic(World):
    """Every so many steps' computation takes longer."""

    period: int = 4
    longer: float = 0.3

    def run_step(self) -> tuple[np.ndarray, StepRecord]:
        usual_us = self.compute_us
        self.compute_us *= 1.0 + self.longer * (self.step % self.period == self.period - 1)
        block, record = super().run_step()
        self.compute_us = usual_us
        return block, record


@pytest.mark.parametrize("period", [2, 3, 4, 6, 8])
def test_longer_steps_that_come_again_are_no_variants_doing(period: int) -> None:
    """Nothing computes beside calls here: a variant has slower calls, and that is all."""
    place = fabric.load("few_sms_node").communicator(range(8))
    calls = [Call(kind, phase, size) for size in (1 << 16, 3 << 20, 5 << 24) for kind, phase in KINDS] * 2
    for seed in range(2):
        world = Periodic("few_sms_node", place, calls, seed=seed, period=period)
        world.compute_us = 2.3 * sum(world.truth(call, BASELINE)[0] for call in calls)
        brain = make_brain(world)
        play(world, brain, 60)
        while brain._policy.trials:
            play(world, brain, 1)
        changes = {
            state.index: next(one for one in brain._surrogate.fields.of(state).options if one.n_channels == 8)
            for state in brain._states
        }
        _begin(brain, Variant("at most 8 channels", changes), world.step)
        play(world, brain, 250)
        baseline_us, _, ours_us = map(sum, zip(*gain_share(world, brain).values(), strict=True))
        assert ours_us <= baseline_us


@dataclass
class WorldOfSlowPlans(World):
    """Calls of `slow` take `ratio` times as long as those of NCCL's choice."""

    slow: Candidate | None = None
    ratio: float = 3.0

    def truth(self, call: Call, candidate: Candidate) -> tuple[float, Candidate]:
        us, ran = super().truth(call, candidate)
        usual_us = super().truth(call, BASELINE)[0]
        return (self.ratio * usual_us if candidate == self.slow else us), ran


def _play_a_variant(ratio: float, n_calls: int) -> tuple[Brain, Candidate, int]:
    """A settled job with a variant on trial: the brain, what the variant runs, and in how many steps."""
    place = fabric.load("h100_node").communicator(range(8))
    calls = [Call(kind, Phase.other, 1 << 22) for kind in (GATHER, SCATTER)]
    world = WorldOfSlowPlans("h100_node", place, calls * n_calls, ratio=ratio, seed=3)
    brain = make_brain(world)
    play(world, brain, 100)
    while brain._policy.trials or brain._step_feedback.is_comparing:
        play(world, brain, 1)
    state = next(one for one in brain._states if one.key.collective is GATHER)
    options = brain._surrogate.fields.of(state).options
    usual = world.setting(calls[0], state.incumbent)
    new = [one for one in options if brain._regimes.evidence.find(state.index, one) is None]
    fewer = [one for one in new if one.protocol is usual.protocol and 0 < one.n_channels < usual.n_channels]
    world.slow = max(fewer, key=lambda one: one.n_channels)
    brain.decisions()
    _begin(brain, Variant("fewer channels", {state.index: world.slow}), world.step)
    n_ran = 0
    for _ in range(60):
        play(world, brain, 1)
        n_ran += world.chosen(calls[0]) == world.slow
    return brain, world.slow, n_ran


@pytest.mark.parametrize("n_calls", [1, 4])
def test_calls_that_are_catastrophically_slow_end_a_plan_on_trial_at_once(n_calls: int) -> None:
    brain, slow, n_ran = _play_a_variant(3.0, n_calls)
    # One call may have connected something: two must agree.
    assert 1 <= n_ran <= (2 if n_calls == 1 else 1)
    state = next(one for one in brain._states if slow in one.banned)
    assert state.key.collective is GATHER
    assert _ended_by_calls(brain) == [True]


def test_calls_that_are_only_slower_are_left_to_steps() -> None:
    brain, slow, n_ran = _play_a_variant(1.5, 4)
    assert n_ran
    assert not any(slow in one.banned for one in brain._states)
    assert not any(_ended_by_calls(brain))
    assert brain.budget.spent_us > 0.0


def _ended_by_calls(brain: Brain) -> list[bool]:
    """By variant that ended, whether calls spoke against it."""
    return ["times as long with it" in one.reason for one in brain.decisions() if one.kind == "variant"]


# ---- one variant's trial alone, over many seeds -------------------------------------------------------------

VARIANT = Variant("at most 4 channels", {0: Candidate()})


class Trial:
    """One variant on trial over steps of 10 ms: it ends as `is_better` says."""

    def __init__(self) -> None:
        world, self.brain = _hidden_job()
        play(world, self.brain, 2)
        self.brain._step_feedback._variants.reset()
        self.brain.budget.earn(1e9)
        self.variants, self.effects = self.brain._step_feedback._variants, StepEffects()
        self.n_on = 0

    def run(self, step_us: Callable[[bool], float], n_before: int = 60) -> bool | None:
        """Steps without it, and then its trial; None without a verdict."""
        for _ in range(n_before):
            self.effects.step(math.log(step_us(False)), {})
        self.variants.begin(VARIANT, 0, 10_000.0, self.effects)
        for step in range(1, 400):
            is_on = self.variants.running is not None
            self.n_on += is_on
            duration_us = step_us(is_on)
            self.effects.step(math.log(duration_us), {ARM: 1.0} if is_on else {})
            plan = PlanInForce([], np.zeros(0, np.bool_), Plan(1), VARIANT if is_on else None)
            if self.variants.judge(plan, step, duration_us, self.effects, self.brain._states):
                return any(one.kind == "rollback" for one in self.brain.decisions())  # it goes back to the baseline
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
        assert trial.brain.budget.spent_us < 10_000.0
    assert n_adopted >= 4 if gain > 0.0 else not n_adopted


def test_a_variant_that_is_truly_slow_is_charged_and_does_not_come_back() -> None:
    chance, trial = np.random.default_rng(0), Trial()
    assert trial.run(lambda is_on: 10_000.0 * math.exp(chance.normal(0.0, 0.005) + 0.2 * is_on)) is False
    assert trial.brain.budget.spent_us == pytest.approx(trial.n_on * 10_000.0 * math.expm1(0.2), rel=0.2)
    assert trial.variants._tried[VARIANT.name][0] == NEVER_STEP
    spent_us = trial.brain.budget.spent_us
    trial.variants.charge_late()
    assert trial.brain.budget.spent_us == pytest.approx(spent_us + 10_000.0 * math.expm1(0.2), rel=0.2)


def test_variants_come_back_ever_more_rarely() -> None:
    trial, waits = Trial(), []
    for step in (0, 1000, 2000):
        trial.variants.begin(VARIANT, step, 10_000.0, trial.effects)
        waits.append(trial.variants._tried[VARIANT.name][0] - step)
    assert waits == [AGAIN_AFTER_STEPS, 2 * AGAIN_AFTER_STEPS, 4 * AGAIN_AFTER_STEPS]
