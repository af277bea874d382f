"""Withdrawn is what makes steps slower, whatever its calls say; what slows steps down otherwise is not its doing."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.brain_world import Call, World, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, Phase, Protocol
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.policy.step_guard import WITHDRAWN_REST_STEPS

FASTER = Candidate(Algorithm.pat, Protocol.simple, 4)
"""For gathers, by their calls."""
NOTHING_BY_ITSELF = BrainSettings(budget_fraction=0.0)


def _job(seed: int, step_noise: float, settings: BrainSettings | None = None) -> tuple[World, Brain]:
    """Gathers and scatters of one size, which both have something to gain."""
    place = fabric.load("ethernet_boxes").communicator(range(16))
    calls = [
        *[Call(Collective.all_gather, Phase.forward_gather, 1 << 17)] * 2,
        *[Call(Collective.reduce_scatter, Phase.gradient_scatter, 1 << 17)] * 2,
    ]
    world = World("ethernet_boxes", place, calls, seed=seed, compute_us=100_000.0, step_noise=step_noise)
    return world, make_brain(world, settings=settings)


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


def _promoted(world: World, brain: Brain) -> None:
    """FASTER is promoted for gathers."""
    play(world, brain, 20)
    state = next(state for state in brain._states if state.key.collective is Collective.all_gather)
    brain._policy.begin_lead(state, FASTER, (0.1, 0.05), reason="earlier runs", is_proven=True)
    while state.incumbent != FASTER:
        play(world, brain, 1)


@pytest.mark.parametrize("step_noise", [0.003, 0.01])
def test_what_slows_steps_down_is_withdrawn_soon_and_what_came_with_it_stays(step_noise: float) -> None:
    n_slow, n_guilty, n_innocent, n_kept = [], 0, 0, 0
    for seed in range(1000, 1010):
        world, brain = _job(seed, step_noise)
        n_slow.append(_play_slowed(world, brain, 120, 1.03))
        by_kind = {state.key.collective: state for state in brain._states}
        gathers, scatters = by_kind[Collective.all_gather], by_kind[Collective.reduce_scatter]
        n_guilty += gathers.n_withdrawn > 0 and gathers.incumbent.is_baseline
        n_innocent += scatters.n_withdrawn > 0
        n_kept += not scatters.incumbent.is_baseline
    assert n_guilty >= 9
    assert n_kept >= 9
    assert n_innocent <= 1
    assert np.median(n_slow) <= 15
    assert np.quantile(n_slow, 0.9) <= 30


@pytest.mark.parametrize("slowdown", [1.03, 1.3])
def test_a_promotion_alone_is_withdrawn_and_its_key_rests(slowdown: float) -> None:
    for seed in range(3):
        world, brain = _job(seed, 0.005, NOTHING_BY_ITSELF)
        _promoted(world, brain)
        assert _play_slowed(world, brain, 40, slowdown) <= 20
        state = next(state for state in brain._states if state.n_withdrawn)
        assert state.incumbent.is_baseline
        assert state.quiet_until > world.step
        assert state.quiet_until - world.step <= WITHDRAWN_REST_STEPS
        told = [one for one in brain.decisions() if one.kind == "rollback"]
        assert [(one.key, one.candidate.is_baseline) for one in told] == [(state.key, True)]


@pytest.mark.parametrize("slowdown", [1.03, 1.3, 2.0])
def test_steps_that_stay_slow_without_it_are_not_its_doing(slowdown: float) -> None:
    """A batch that grows as something is promoted."""
    for seed in range(3):
        world, brain = _job(seed, 0.005, NOTHING_BY_ITSELF)
        _promoted(world, brain)
        world.compute_us *= slowdown
        play(world, brain, 60)
        state = next(state for state in brain._states if state.key.collective is Collective.all_gather)
        assert state.incumbent == FASTER
        assert not state.n_withdrawn


def test_what_was_withdrawn_meanwhile_does_not_become_what_others_are_compared_with() -> None:
    """Else a pause would run it."""
    world, brain = _job(1, 0.005, NOTHING_BY_ITSELF)
    _promoted(world, brain)
    play(world, brain, 20)
    state = next(state for state in brain._states if state.key.collective is Collective.all_gather)
    assert brain._step_feedback._guarded.is_watching
    brain._policy.set_incumbent(state, BASELINE, "rollback", "NCCL does not offer it here")
    brain._urgent = True
    play(world, brain, 5)
    assert not brain._step_feedback._guarded.is_watching
    brain._policy.begin_trial(state, Candidate(Algorithm.ring, Protocol.ll, 4), "", (0.1, 0.05))
    compute_us = world.compute_us
    for _ in range(100):
        world.compute_us = compute_us * (1.3 if world.plan.rows else 1.0)
        play(world, brain, 1)
        assert all(row.candidate != FASTER for row in world.plan.rows)


def test_a_slow_trial_at_its_key_is_not_held_against_it() -> None:
    """Whatever shows in steps of a trial alone ends the trial."""
    world, brain = _job(1, 0.005, NOTHING_BY_ITSELF)
    _promoted(world, brain)
    state = next(state for state in brain._states if state.key.collective is Collective.all_gather)
    other = Candidate(Algorithm.ring, Protocol.ll, 4)
    brain._policy.begin_trial(state, other, "to be seen", (0.1, 0.05))
    compute_us = world.compute_us
    for _ in range(60):
        runs_other = any(row.candidate == other for row in world.plan.rows)
        world.compute_us = compute_us * (1.3 if runs_other else 1.0)
        play(world, brain, 1)
    assert state.incumbent == FASTER
    assert state.trial != other
