"""Withdrawn is what makes steps slower, whatever its calls say; what slows steps down otherwise is not its doing."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
from benchmarks.lib.simulated.earlier_jobs import OnlyThese, knowledge, offer_only
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, Phase, Protocol
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.explaining.inspection import KeyView

GATHER = Call(Collective.all_gather, Phase.forward_gather, 1 << 17)
FASTER = Candidate(Algorithm.pat, Protocol.simple, 4)
"""For gathers, by their calls."""
OTHER = Candidate(Algorithm.ring, Protocol.ll, 4)


def _world(seed: int, step_noise: float) -> World:
    """Gathers and scatters of one size, which both have something to gain."""
    place = fabric.load("ethernet_boxes").communicator(range(16))
    calls = [*[GATHER] * 2, *[Call(Collective.reduce_scatter, Phase.gradient_scatter, 1 << 17)] * 2]
    return World("ethernet_boxes", place, calls, seed=seed, compute_us=100_000.0, step_noise=step_noise)


def _play_slowed(world: World, brain: Brain, n_steps: int, slowdown: float) -> int:
    """Steps are slower while gathers run anything but NCCL's choice; how many did."""
    compute_us, n_slow = world.compute_us, 0
    for _ in range(n_steps):
        is_slow = any(row.collective is Collective.all_gather for row in world.plan.rows)
        world.compute_us = compute_us * (slowdown if is_slow else 1.0)
        n_slow += is_slow
        play(world, brain, 1)
    world.compute_us = compute_us
    return n_slow


def _gathers(brain: Brain) -> KeyView:
    return next(one for one in brain.keys if one.key.collective is Collective.all_gather)


def _promoted(seed: int) -> tuple[World, Brain, OnlyThese]:
    """A job in which FASTER was just promoted for gathers, and which is offered nothing else."""
    world = _world(seed, 0.005)
    world.factors[GATHER, OTHER] = 0.96 * world.truth(GATHER, BASELINE)[0] / world.truth(GATHER, OTHER)[0]
    brain = make_brain(world, knowledge(world, proven={(GATHER, FASTER): 0.2}, promising={(GATHER, OTHER): 0.25}))
    offers = offer_only(world, brain, FASTER)
    play(world, brain, 1)
    while _gathers(brain).incumbent != FASTER:
        assert world.step < 60
        play(world, brain, 1)
    return world, brain, offers


def test_a_promotion_that_slows_steps_is_withdrawn_and_others_stay() -> None:
    n_slow, n_guilty, n_innocent, n_kept = [], 0, 0, 0
    for seed in range(1000, 1006):
        world = _world(seed, 0.01)
        brain = make_brain(world)
        n_slow.append(_play_slowed(world, brain, 120, 1.03))
        by_kind = {one.key.collective: one for one in brain.keys}
        gathers, scatters = by_kind[Collective.all_gather], by_kind[Collective.reduce_scatter]
        n_guilty += gathers.n_withdrawn > 0 and gathers.incumbent.is_baseline
        n_innocent += scatters.n_withdrawn > 0
        n_kept += not scatters.incumbent.is_baseline
    assert n_guilty >= 5
    assert n_kept >= 5
    assert n_innocent <= 1
    assert np.median(n_slow) <= 15
    assert np.quantile(n_slow, 0.9) <= 30


@pytest.mark.parametrize("slowdown", [1.03, 1.3])
def test_a_promotion_alone_is_withdrawn_and_its_key_rests(slowdown: float) -> None:
    for seed in range(3):
        world, brain, _ = _promoted(seed)
        assert _play_slowed(world, brain, 40, slowdown) <= 20
        state = next(one for one in brain.keys if one.n_withdrawn)
        assert state.incumbent.is_baseline
        assert state.rests_until_step > world.step
        assert state.rests_until_step - world.step <= 100
        told = [one for one in brain.decisions() if one.kind == "rollback"]
        assert [(one.key, one.candidate.is_baseline) for one in told] == [(state.key, True)]


@pytest.mark.parametrize("slowdown", [1.03, 1.3, 2.0])
def test_steps_that_stay_slow_without_it_are_not_its_doing(slowdown: float) -> None:
    """A batch that grows as something is promoted."""
    for seed in range(3):
        world, brain, _ = _promoted(seed)
        world.compute_us *= slowdown
        play(world, brain, 60)
        assert _gathers(brain).incumbent == FASTER
        assert not _gathers(brain).n_withdrawn


def test_a_withdrawn_setting_is_not_compared_with() -> None:
    """Else a pause would run it."""
    world, brain, offers = _promoted(1)
    play(world, brain, 20)
    assert _gathers(brain).is_watched
    offers.change(OTHER)
    compute_us = world.compute_us
    for n_steps in range(100):
        world.compute_us = compute_us * (1.3 if world.plan.rows else 1.0)
        play(world, brain, 1)
        if n_steps > 2:
            assert all(row.candidate != FASTER for row in world.plan.rows)
            assert _gathers(brain).incumbent.is_baseline
            assert not _gathers(brain).is_watched
    told = [(one.kind, one.candidate) for one in brain.decisions() if one.key == _gathers(brain).key]
    assert told.index(("rollback", BASELINE)) < told.index(("explore", OTHER))
    assert _gathers(brain).n_withdrawn


def test_a_slow_trial_at_its_key_is_not_held_against_it() -> None:
    """Whatever shows in steps of a trial alone ends the trial."""
    world, brain, offers = _promoted(1)
    offers.change(FASTER, OTHER)
    compute_us = world.compute_us
    for _ in range(60):
        runs_other = any(row.candidate == OTHER for row in world.plan.rows)
        world.compute_us = compute_us * (1.3 if runs_other else 1.0)
        play(world, brain, 1)
    assert OTHER in _gathers(brain).tried
    assert _gathers(brain).incumbent == FASTER
    assert _gathers(brain).trial != OTHER
