"""What the brain promises and hardly shows: each of these would otherwise be lost without a word."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
from benchmarks.lib.simulated.earlier_jobs import knowledge, offer_only
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, Phase, Protocol
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.explaining.inspection import KeyView
from zerotune.tuner.learning.policy.risk import FIRST_LOOK_STEPS
from zerotune.tuner.modeling.cost_prior import CostPrior

GATHER = Call(Collective.all_gather, Phase.forward_gather, 1 << 17)
SCATTER = Call(Collective.reduce_scatter, Phase.gradient_scatter, 1 << 17)
TRIED = Candidate(Algorithm.pat, Protocol.simple, 4)


def _world(*, seed: int = 0, flat: bool = False) -> World:
    """A job with gathers and scatters."""
    place = fabric.load("ethernet_boxes").communicator(range(16))
    return World("ethernet_boxes", place, [GATHER, SCATTER] * 2, compute_us=100_000.0, seed=seed, flat=flat)


def _gathers(brain: Brain) -> KeyView:
    return next(one for one in brain.keys if one.key.collective is Collective.all_gather)


def _best(world: World) -> Candidate:
    """What is fastest for gathers."""
    options = make_brain(world).costs.candidates(world.communicator, GATHER.collective)
    return min(options, key=lambda one: world.truth(GATHER, one)[0])


def _ran(world: World) -> bool:
    return world.chosen(GATHER) == TRIED


@pytest.mark.parametrize("seed", range(4))
def test_a_recovering_network_promotes_no_trial(seed: int) -> None:
    """Its calls are a third shorter than those of before, but so are everybody's."""
    world = _world(seed=seed, flat=True)
    brain = make_brain(world, knowledge(world, promising={(GATHER, TRIED): 0.25}))
    offers = offer_only(world, brain)
    play(world, brain, 8)
    world.slowdown = {"all_gather": 1.5, "reduce_scatter": 1.5}
    play(world, brain, 40)
    offers.change(TRIED)
    while not _ran(world):
        assert world.step < 80
        play(world, brain, 1)
    assert _gathers(brain).trial == TRIED
    world.slowdown = {}
    play(world, brain, 12)
    assert [one.kind for one in brain.decisions() if one.kind == "promote"] == []


def test_plans_tell_that_gathers_come_after_the_step_once_that_is_seen() -> None:
    """ZeRO-1: gradients are reduced, and updated parameters gathered once per step."""
    world = _world()
    brain = make_brain(world)
    play(world, brain, 8)
    assert not world.plan.gathers_after_step
    one_step = [*[(Collective.reduce_scatter, 25 << 20)] * 6, *[(Collective.all_gather, 25 << 20)] * 6]
    one_step.append((Collective.all_reduce, 4))
    block = np.zeros(len(one_step), np.dtype(OBSERVATION_FIELDS))
    block["collective"], block["message_bytes"] = zip(*one_step, strict=True)
    for _ in range(6):
        brain.sequence(block)
    play(world, brain, 2)
    assert world.plan.gathers_after_step


@pytest.mark.parametrize("kind", ["promising", "proven"])
def test_nothing_is_tried_while_the_budget_is_overdrawn(kind: str) -> None:
    """What earlier jobs proved runs on: it costs nothing as far as is known."""
    world = _world(flat=True)
    brain = make_brain(world, knowledge(world, **{kind: {(GATHER, TRIED): 0.05}}))
    offer_only(world, brain, TRIED)
    while not _ran(world) or (world.plan.then and world.plan.then[0].n_steps == FIRST_LOOK_STEPS):
        assert world.step < 20
        play(world, brain, 1)
    assert TRIED in (_gathers(brain).trial, _gathers(brain).provisional)
    brain.budget.spend(1e6)
    n_ran = 0
    for _ in range(6):
        assert brain.budget.remaining_us < 0
        play(world, brain, 1)
        n_ran += _ran(world)
        assert all(world.chosen(call) in (BASELINE, TRIED) for call in world.calls)
    assert (n_ran > 0) == (kind == "proven")
    if kind == "promising":
        n_explored = brain.n_explored
        brain.budget.spend(-1e9)
        play(world, brain, 6)
        assert brain.n_explored > n_explored


def test_another_network_is_another_chance_for_what_was_banned() -> None:
    """Steps were slower with it on the network of before, and are not on this one."""
    world = _world()
    best = _best(world)
    brain = make_brain(world, knowledge(world, promising={(GATHER, best): 0.3}))
    offer_only(world, brain, best)
    usual_us = world.compute_us
    play(world, brain, 1)
    while best not in _gathers(brain).banned:
        assert world.step < 120
        world.compute_us = usual_us * (1.1 if world.chosen(GATHER) == best else 1.0)
        play(world, brain, 1)
    world.compute_us = usual_us
    play(world, brain, 30)
    assert best in _gathers(brain).banned
    assert world.chosen(GATHER).is_baseline
    world.slowdown = {"all_gather": 1.6, "reduce_scatter": 1.6}
    play(world, brain, 12)
    assert brain.regime == 1
    assert not _gathers(brain).banned
    play(world, brain, 60)
    assert _gathers(brain).usual == best


@pytest.mark.parametrize("pressure", [0.3, 0.97])
def test_without_exploration_only_what_earlier_jobs_proved_is_used(pressure: float) -> None:
    world = _world()
    best = _best(world)
    brain = make_brain(world, knowledge(world, proven={(GATHER, best): 0.6}), BrainSettings(explore=False))
    plans = play(world, brain, 60)
    world.memory_pressure = pressure
    plans += play(world, brain, 5)
    world.memory_pressure = 0.2
    plans += play(world, brain, 35)
    assert _gathers(brain).incumbent == best
    if pressure < 0.9:
        assert {row.candidate for plan in plans for row in plan.rows} == {best}
    assert all(row.candidate == best for row in plans[-1].rows)
    assert brain.n_explored == 0
    assert {one.kind for one in brain.decisions()} <= {"prior", "promote", "keep"}


def test_an_earlier_winner_that_is_slow_here_is_charged_and_dropped() -> None:
    world = _world()
    brain = make_brain(world, knowledge(world, proven={(GATHER, TRIED): 0.6}))
    world.factors[GATHER, TRIED] = 10.0 * world.truth(GATHER, BASELINE)[0] / world.truth(GATHER, TRIED)[0]
    lost_us, n_ran = 0.0, 0
    for _ in range(12):
        n_ran += _ran(world)
        lost_us += 2 * _ran(world) * (world.truth(GATHER, TRIED)[0] - world.truth(GATHER, BASELINE)[0])
        play(world, brain, 1)
    assert 1 <= n_ran <= 2
    assert TRIED in _gathers(brain).banned
    assert "rollback" in {one.kind for one in brain.decisions()}
    assert brain.budget.spent_us == pytest.approx(lost_us, rel=0.1)
    assert brain.n_explored == 0, "it was none of this job's trials"


def test_an_earlier_winner_that_is_faster_costs_nothing() -> None:
    world = _world()
    best = _best(world)
    brain = make_brain(world, knowledge(world, proven={(GATHER, best): 0.6}), BrainSettings(budget_fraction=0.0))
    play(world, brain, 30)
    assert _gathers(brain).incumbent == best
    assert brain.budget.spent_us == 0.0


def test_steps_of_another_network_are_no_yardstick_for_plans() -> None:
    """Steps are as long as before, since computation is most of them: only calls tell that the network is another."""
    world = _world()
    world.compute_us *= 20
    best = _best(world)
    brain = make_brain(world, knowledge(world, proven={(GATHER, best): 0.6}))
    offers = offer_only(world, brain, best)
    play(world, brain, 1)
    while _gathers(brain).incumbent != best:
        assert world.step < 60
        play(world, brain, 1)
    play(world, brain, 5)
    assert _gathers(brain).is_watched
    world.slowdown = {"all_gather": 1.6, "reduce_scatter": 1.6}
    changed_at = world.step
    while brain.regime == 0:
        play(world, brain, 1)
        assert world.step - changed_at <= 25
    assert not _gathers(brain).is_watched
    brain.decisions()
    # Too few steps are known again to guard what would be tried by.
    noticed_at = world.step
    offers.change(*CostPrior({"emulated": world.fabric_name}).candidates(world.communicator, GATHER.collective))
    play(world, brain, 30)
    begun = [one.step - noticed_at for one in brain.decisions() if one.kind == "explore" and one.step is not None]
    assert begun
    assert min(begun) >= 10


def _decided(n_gathers: int, *, memory_pressure: float) -> np.ndarray:
    """What rank 0 tells of gathers that were enqueued and not measured, shape [n_gathers]."""
    block = np.zeros(n_gathers, np.dtype(OBSERVATION_FIELDS))
    block["n_ranks"] = block["n_nodes"] = 16
    block["collective"], block["phase"] = GATHER.collective, GATHER.phase
    block["message_bytes"], block["memory_pressure"] = GATHER.message_bytes, memory_pressure
    return block


@pytest.mark.parametrize("memory_pressure", [0.4, 0.99, -1.0])
def test_an_earlier_winner_runs_at_once_if_memory_has_room(memory_pressure: float) -> None:
    world = _world()
    brain = make_brain(world, knowledge(world, proven={(GATHER, TRIED): 0.2}))
    brain.sequence(_decided(1, memory_pressure=memory_pressure))
    plan = brain.propose()
    has_room = 0 <= memory_pressure < 0.9
    assert (plan is not None and [row.candidate for row in plan.rows] == [TRIED]) == has_room
    if memory_pressure < 0:
        assert plan is None, "how full the device is, nobody knows yet"


def test_unproven_settings_wait_for_measurements() -> None:
    for past in ({}, {"provisional": {(GATHER, TRIED): 0.1}}, {"promising": {(GATHER, TRIED): 0.25}}):
        world = _world()
        brain = make_brain(world, knowledge(world, **past))
        brain.sequence(_decided(6, memory_pressure=0.4))
        assert brain.propose() is None
        assert not brain.keys
