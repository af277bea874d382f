"""Caps on channels: which are asked about, what a trial of one teaches, what an adopted one forbids until lifted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.brain_world import Call, OverlappedWorld, World, decided, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, Phase, Protocol
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.policy.steps.channel_caps import CapSearch, Fallback, least_cost
from zerotune.tuner.learning.policy.steps.step_trial import GroupChange, Variant, VariantResult, audits, group_of
from zerotune.tuner.learning.policy.trials.training_cost import Change, TrainingCost

KINDS = ((Collective.all_gather, Phase.forward_gather), (Collective.reduce_scatter, Phase.gradient_scatter))


def _brain(n_steps: int = 12) -> Brain:
    """A job whose collectives hide behind computation that their channels slow down."""
    place = fabric.load("few_sms_node").communicator(range(8))
    calls = [Call(kind, phase, 1 << exponent) for exponent in (22, 24) for kind, phase in KINDS for _ in range(3)]
    world = OverlappedWorld("few_sms_node", place, calls, compute_us=40_000.0)
    brain = make_brain(world)
    play(world, brain, n_steps)
    return brain


def _cap(brain: Brain, most: int) -> Variant:
    changes = {}
    for state in brain._states:
        options = brain._outlook.fields.of(state).options
        changes[state.index] = max((one for one in options if one.n_channels <= most), key=lambda one: one.n_channels)
    return Variant(f"at most {most} channels", changes, most)


def test_what_an_adopted_cap_forbids_is_allowed_again_once_it_is_lifted() -> None:
    brain = _brain()
    states, variants = brain._states, brain._oversight._variants
    before = [state.incumbent for state in states]
    wide = {state.index: brain._outlook.fields.of(state).options for state in states}

    def allowed(at_least: int) -> list[bool]:
        return [
            any(one.n_channels >= at_least and brain._policy.options.may_try(state, one) for one in wide[state.index])
            for state in states
        ]

    assert all(allowed(16))
    variants._adopt(VariantResult(_cap(brain, 4), True, 0.05, 0.001), states)
    assert all(state.n_channels <= 4 for state in states)
    assert not any(allowed(5))
    lifting = [variant for variant in audits(states) if variant.lifts_cap]
    assert {index for variant in lifting for index in variant.changes} == {state.index for state in states}
    for variant in lifting:
        variants._adopt(VariantResult(variant, True, 0.05, 0.001), states)
    assert [state.incumbent for state in states] == before
    assert all(allowed(16))
    assert not any(variant.lifts_cap for variant in audits(states))


def test_caps_are_asked_about_for_all_and_for_each_group_alone() -> None:
    brain = _brain()
    search = CapSearch(brain._states)
    while not search.is_done:
        search.advance(lambda state, caps: {cap: Fallback(state.incumbent, 1.0, 2.0, 3.0) for cap in caps})
    groups = {group_of(state) for state in brain._states}
    assert len(groups) == 2
    by_groups = {frozenset(variant.by_group): variant for variant in search.variants()}
    assert set(by_groups) == {frozenset(groups), *(frozenset({name}) for name in groups)}
    for affected, variant in by_groups.items():
        assert set(variant.changes) == {state.index for state in brain._states if group_of(state) in affected}


def test_trials_of_caps_teach_what_channels_cost() -> None:
    brain = _brain(400)
    variants = brain._oversight._variants
    assert any(name.startswith("at most") for name in variants._trials._tried)
    change = {group_of(state): Change(0.0, 1.0) for state in brain._states}
    learned, fresh = variants._training_cost.expected(change, 0.3), TrainingCost().expected(change, 0.3)
    assert learned[1] < 0.75 * fresh[1]
    assert learned[0] > 3 * learned[1], "channels slow computation down here: releasing one is a gain"


def test_variants_that_may_lose_a_tenth_of_the_step_are_not_tried_whatever_they_may_gain() -> None:
    brain = _brain(60)
    states, variants, evidence = brain._states, brain._oversight._variants, brain._regimes.evidence
    step_us = variants._step_us
    assert math.isfinite(step_us)
    worth = []
    for extra in (0.2, 0.5):
        by_group = {group_of(states[0]): GroupChange(extra * step_us, step_us)}
        variant = Variant("some", {states[0].index: states[0].incumbent}, 4, by_group)
        worth.append(variants._worth(variant, states, evidence, 10_000))
    assert worth[0] > 0
    assert worth[1] == 0.0


def test_it_is_known_how_long_each_group_runs() -> None:
    """Where one group turns out to be waited for, the others are less: that takes their shares of a step."""
    brain = _brain(30)
    variants, cost = brain._oversight._variants, brain._oversight._variants._training_cost
    assert not variants._trials._tried
    variants._worth(_cap(brain, 4), brain._states, brain._regimes.evidence, 30)
    names = sorted({group_of(state) for state in brain._states})
    first, other = ({name: Change(0.05, 0.0)} for name in names)
    before = cost.expected(other, 0.3)[0]
    cost.learn(first, 0.3, -0.05, 0.0001)
    assert cost.expected(other, 0.3)[0] > before + 1e-4


def test_a_cap_that_comes_before_any_trial_leaves_its_keys_to_what_it_allows() -> None:
    """Nothing says that the setting it fell back to is the best within it."""
    place = fabric.load("ethernet_boxes").communicator(range(2))
    call = Call(Collective.all_gather, Phase.forward_gather, 132_352)
    world = World("ethernet_boxes", place, [call] * 3, compute_us=150.0, seed=1)
    brain = make_brain(world)
    play(world, brain, 8)
    (state,) = brain._states
    assert not state.n_tried
    fallback = Candidate(Algorithm.ring, Protocol.ll, 4)
    variant = Variant("cap", {0: fallback}, max_channels=4)
    brain._oversight._variants._adopt(VariantResult(variant, True, 0.1, 0.01), brain._states)
    assert state.incumbent == fallback
    play(world, brain, 200)
    assert state.n_tried
    assert all(one.n_channels <= 4 for one in state.numbers)


@given(
    st.lists(
        st.tuples(st.integers(1, 32), st.floats(0.0, 12.0)), min_size=1, max_size=12, unique_by=lambda one: one[0]
    ),
    st.floats(0.0, 1.0),
    st.floats(0.001, 0.1),
    st.sets(st.integers(1, 32)),
)
def test_what_costs_training_least_is_the_least_of_what_may_run(
    settings: list[tuple[int, float]], by_time: float, by_channel: float, refused: set[int]
) -> None:
    options = (BASELINE, *(Candidate(Algorithm.ring, Protocol.simple, channels) for channels, _ in settings))
    log_us = np.array([0.0, *(log for _, log in settings)])
    costs = [math.exp(log) * (by_time + by_channel * channels) for channels, log in settings]
    now = settings[0][0], math.exp(settings[0][1])
    found = least_cost(options, log_us, (by_time, by_channel), now, lambda one: one.n_channels not in refused)
    cheaper = [
        (cost, channels)
        for cost, (channels, _) in zip(costs, settings, strict=True)
        if cost < costs[0] * (1 - 1e-9) and channels not in refused
    ]
    if cheaper:
        assert found is not None
        assert costs[found - 1] == pytest.approx(min(cheaper)[0])
    else:
        assert found is None or costs[found - 1] == pytest.approx(costs[0])


@pytest.mark.slow
def test_each_size_ends_with_the_channels_that_it_is_worth() -> None:
    """One cap for all sizes takes too many from the smaller messages' rivals, and too few from others."""
    machine = fabric.load("h100_node")
    kinds = (
        (Collective.all_gather, Phase.forward_gather),
        (Collective.all_gather, Phase.backward_gather),
        (Collective.reduce_scatter, Phase.gradient_scatter),
        (Collective.all_gather, Phase.post_step_gather),
    )
    calls = [Call(kind, phase, 1 << size) for size in (18, 20, 22, 24, 26) for kind, phase in kinds for _ in range(3)]
    waited_for = frozenset({Phase.forward_gather})
    world = OverlappedWorld(
        "h100_node", machine.communicator(range(machine.ranks_per_node)), calls, waited_for=waited_for
    )
    world.compute_us = sum(world.truth(call, BASELINE)[0] for call in calls if call.phase not in waited_for) / 0.3
    brain = make_brain(world)
    play(world, brain, 1000)
    chosen = decided(brain)
    grow = [
        chosen(Call(kind, phase, 1 << 20)).n_channels < chosen(Call(kind, phase, 1 << 26)).n_channels
        for kind, phase in kinds
        if phase not in waited_for
    ]
    assert any(grow)
    assert brain.spent_percent <= 1.0
