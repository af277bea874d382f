"""After a change of the network what was measured before it is not forgotten: what was bad is believed to be bad."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from benchmarks.lib.brain_world import Call, World, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    DecisionKey,
    Phase,
    Protocol,
    StepRecord,
    size_class,
)
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.policy.plans import Variant

SIZES = (1 << 16, 1 << 19, 3 << 20, 1 << 23, 5 << 24)
KINDS = (
    (Collective.all_gather, Phase.forward_gather),
    (Collective.all_gather, Phase.backward_gather),
    (Collective.reduce_scatter, Phase.gradient_scatter),
)
LARGE = 1 << 23


@dataclass
class ChangingWorld(World):
    """A network of which large and small messages slow down by factors of their own."""

    large: float = 1.0
    small: float = 1.0

    def truth(self, call: Call, candidate: Candidate) -> tuple[float, Candidate]:
        us, ran = super().truth(call, candidate)
        return us * (self.large if call.message_bytes >= LARGE else self.small), ran

    def over_default(self) -> float:
        """How many times as long as with NCCL's own choices the step to come takes."""
        ours = sum(self.truth(call, self.chosen(call))[0] for call in self.calls)
        default = sum(self.truth(call, BASELINE)[0] for call in self.calls)
        return (self.compute_us + ours) / (self.compute_us + default)


def _world(seed: int, place: str = "rtx5090_loopback") -> ChangingWorld:
    machine = fabric.load(place)
    calls = [Call(*kind, nbytes) for nbytes in SIZES for kind in KINDS for _ in range(2)]
    world = ChangingWorld(place, machine.communicator(range(min(16, machine.max_ranks))), calls, seed=seed)
    world.compute_us = 2.3 * sum(world.truth(call, BASELINE)[0] for call in calls)
    return world


def _until_the_regime_is(regime: int, world: World, brain: Brain) -> None:
    for _ in range(25):
        if brain.regime == regime:
            return
        play(world, brain, 1)
    raise AssertionError(f"regime {regime} was not noticed")


def _call(world: World, key: DecisionKey) -> Call:
    place = key.collective, key.phase, key.size_class
    return next(one for one in world.calls if (one.collective, one.phase, size_class(one.message_bytes)) == place)


@pytest.mark.parametrize(("seed", "large", "small"), [(41, 1.6, 1.6), (42, 2.5, 1.0), (43, 2.5, 1.0)])
def test_a_change_is_no_occasion_for_catastrophes(seed: int, large: float, small: float) -> None:
    """What was never worth a trial in 150 steps is not the first choice after them: steps took six times as long."""
    world = _world(seed)
    brain = make_brain(world)
    play(world, brain, 150)
    world.large, world.small = large, small
    worst = 0.0
    for _ in range(80):
        play(world, brain, 1)
        worst = max(worst, world.over_default())
    assert brain.regime == 1
    assert worst < 1.5
    assert brain.spent_percent < 1.0


def test_what_was_slow_is_believed_to_be_slow_and_the_network_to_be_slower() -> None:
    """At each key by as much as what runs there became slower, for what was tried and for what was not."""
    world = _world(44)
    brain = make_brain(world)
    play(world, brain, 120)
    states, surrogate, before = brain._states, brain._surrogate, brain._regimes.evidence
    then = {state.index: surrogate.posterior(state, states, before)[0].copy() for state in states}
    world.large = 2.5
    _until_the_regime_is(1, world, brain)
    play(world, brain, 3)
    evidence = brain._regimes.evidence
    errors = []
    for state in states:
        now, spread = surrogate.posterior(state, states, evidence)
        known = np.isfinite(now) & np.isfinite(then[state.index])
        moved = (now - then[state.index])[known]
        is_large = state.message_bytes >= LARGE
        assert np.median(moved) == pytest.approx(math.log(2.5) if is_large else 0.0, abs=0.45)
        options = surrogate.fields.of(state).options
        usual = options.index(state.usual)
        for at, option in enumerate(options):
            slot = before.find(state.index, option)
            if slot is None or not before.n_calls[slot] or evidence.has_measured(state.index, option):
                continue
            took = world.truth(_call(world, state.key), option)[0]
            errors.append(abs(now[at] - math.log(took)))
            assert spread[at] > 0.05, "but that is no longer as sure as what was measured just now"
            if took > 2.1 * math.exp(now[usual]):
                assert now[at] > now[usual] + math.log(1.25)
    assert np.median(errors) < 0.25


def test_without_a_change_nothing_is_carried() -> None:
    world = _world(45)
    brain = make_brain(world)
    play(world, brain, 60)
    assert brain.regime == 0
    places = brain._surrogate._places[world.communicator]
    assert all(places.level(state) == 0.0 for state in brain._states)


def test_what_an_older_regime_knew_returns_with_it_and_what_came_later_is_kept() -> None:
    """Levels are counted from where the job began, so that going back and forth does not add up."""
    world = _world(46)
    brain = make_brain(world)
    play(world, brain, 60)
    for factor, regime in ((1.6, 1), (1.0, 0), (2.5, 3)):
        world.large = world.small = factor
        _until_the_regime_is(regime, world, brain)
        play(world, brain, 25)
        places = brain._surrogate._places[world.communicator]
        levels = [places.level(state) for state in brain._states]
        assert levels == pytest.approx([math.log(factor)] * len(levels), abs=0.2)


def test_keys_seen_first_after_a_change_are_where_others_of_their_size_are() -> None:
    world = _world(47)
    brain = make_brain(world)
    play(world, brain, 60)
    world.large = 2.5
    _until_the_regime_is(1, world, brain)
    play(world, brain, 5)
    world.calls = [*world.calls, Call(*KINDS[0], 9 << 20), Call(*KINDS[0], 1 << 17)]
    play(world, brain, 1)
    places = brain._surrogate._places[world.communicator]
    new_large, new_small = (places.level(state) for state in brain._states[-2:])
    assert new_large == pytest.approx(math.log(2.5), abs=0.1)
    assert new_small == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize("seed", [48, 49])
def test_what_may_be_a_catastrophe_is_tried_at_one_key_first(seed: int) -> None:
    """The same setting at the same size, in another phase or collective, waits until the first has shown itself."""
    world = _world(seed)
    brain = make_brain(world)
    n_tried = 0
    begun: dict[int, Candidate] = {}
    for _ in range(40):
        play(world, brain, 1)
        evidence = brain._regimes.evidence
        untold: dict[tuple[object, ...], list[float]] = {}
        for state in brain._policy.trials.values():
            trial = state.trial
            assert trial is not None
            if evidence.has_measured(state.index, trial):
                continue
            n_tried += begun.get(state.index) != trial
            begun[state.index] = trial
            hoped, std = state.hope
            untold.setdefault((trial, state.key.size_class), []).append(2.33 * std - hoped)
        for surprises in untold.values():
            assert sum(one > math.log(2.0) for one in surprises) <= 1
    assert n_tried > 10


def test_a_step_record_is_not_needed_to_carry_anything() -> None:
    """Levels follow measurements alone."""
    world = _world(50)
    brain = make_brain(world)
    for _ in range(60):
        block, record = world.run_step()
        if world.step == 31:
            world.large = world.small = 1.6
        brain.observe(block)
        brain.step_finished(StepRecord(record.step, record.epoch, record.duration_us, None, None))
        world.follow(brain.propose(), brain)
    levels = [brain._surrogate._places[world.communicator].level(state) for state in brain._states]
    assert brain.regime == 1
    assert float(np.median(levels)) == pytest.approx(math.log(1.6), abs=0.02)
    assert levels == pytest.approx([math.log(1.6)] * len(levels), abs=0.3)


@pytest.mark.parametrize("seed", [51, 52, 53])
def test_a_plan_on_trial_while_the_network_recovers_is_not_adopted_for_that(seed: int) -> None:
    """Steps with it are shorter than those of before, but so are all steps."""
    machine = fabric.load("ethernet_boxes")
    calls = [Call(*kind, nbytes) for nbytes in (1 << 17, 1 << 20, 1 << 23) for kind in KINDS for _ in range(2)]
    world = ChangingWorld(
        "ethernet_boxes", machine.communicator(range(16)), calls, seed=seed, compute_us=100_000.0, large=1.6, small=1.6
    )
    brain = make_brain(world)
    play(world, brain, 60)
    feedback = brain._step_feedback
    state = brain._states[0]
    changed = BASELINE if not state.usual.is_baseline else Candidate(Algorithm.ring, Protocol.simple, 2)
    feedback._variants.begin(Variant("tried", {0: changed}), world.step, 1e9, feedback._guarded.effects)
    while (variant := feedback.variant) is None:
        play(world, brain, 1)
        assert world.step < 80
    brain.decisions()
    asks = {(brain._states[index].key, candidate) for index, candidate in variant.changes.items()}
    assert asks
    world.large = world.small = 1.0
    play(world, brain, 10)
    told = brain.decisions()
    assert not [one for one in told if one.kind in ("promote", "rollback") and (one.key, one.candidate) in asks]
