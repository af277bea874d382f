"""A promotion under watch does not answer for what a trial of something else at its key costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.brain_world import Call, World, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import Algorithm, Candidate, Collective, Phase, Plan, Protocol, StepRecord
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.guard import LEAST_KNOWN_STEPS, MOST_KNOWN_STEPS, Guard, steps_to_know
from zerotune.tuner.learning.policy.oversight import REST_STEPS
from zerotune.tuner.learning.policy.plans import PlanInForce

PROMOTED = Candidate(Algorithm.ring, Protocol.simple, 4)
TRIED = Candidate(Algorithm.ring, Protocol.ll, 4)


GATHERS_AND_SCATTERS = [
    *[Call(Collective.all_gather, Phase.forward_gather, 1 << 17)] * 2,
    *[Call(Collective.reduce_scatter, Phase.gradient_scatter, 1 << 17)] * 2,
]


def _watching() -> tuple[Brain, int, float]:
    """A job whose only key has just been promoted; the step from which on, and what steps took before."""
    place = fabric.load("ethernet_boxes").communicator(range(16))
    world = World("ethernet_boxes", place, [Call(Collective.all_reduce, Phase.other, 1 << 20)])
    brain = make_brain(world, settings=BrainSettings(budget_fraction=0.0))
    play(world, brain, 40)
    state, oversight = brain._states[0], brain._oversight
    brain._policy.set_incumbent(state, PROMOTED, "promote", "measured faster")
    oversight.promoted(state, PROMOTED)
    entries = ((50, PROMOTED, False), (51, TRIED, True))
    for epoch, candidate, is_trial in entries:
        brain._plans.add(PlanInForce([candidate], np.array([is_trial]), Plan(epoch), oversight.n_promotions), 0)
    brain.adopted(50, world.step)
    assert oversight._guard.is_watching
    return brain, world.step, float(np.median([us for _, us in oversight._recent]))


def _is_withdrawn(brain: Brain) -> bool:
    """Whether what was promoted has been, whatever came after that."""
    return any(one.kind == "rollback" and one.candidate.is_baseline for one in brain.decisions())


@pytest.mark.parametrize("known_share", [None, 0.8])
def test_a_slow_trial_at_its_key_is_not_held_against_it(known_share: float | None) -> None:
    """Nothing was measured of the trial's cost yet, or not all of it."""
    brain, start, usual_us = _watching()
    for step in range(start, start + 50):
        is_trial = (step - start) % 10 >= 3
        if is_trial and known_share is not None:
            brain._intake.extra_of_step[step] = known_share * 0.3 * usual_us
        duration_us = usual_us * (1.3 if is_trial else 0.95)
        brain.step_finished(StepRecord(step, 51 if is_trial else 50, duration_us, None, None))
    assert brain._states[0].incumbent == PROMOTED
    assert not _is_withdrawn(brain)


def test_what_it_costs_itself_is() -> None:
    brain, start, usual_us = _watching()
    for step in range(start, start + 50):
        is_trial = (step - start) % 10 >= 3
        duration_us = usual_us * (1.3 if is_trial else 1.05)
        brain.step_finished(StepRecord(step, 51 if is_trial else 50, duration_us, None, None))
    assert _is_withdrawn(brain)


def test_steps_of_before_the_change_end_no_watch() -> None:
    """Records may come hundreds at a time, after the change that they do not know of."""
    brain, start, usual_us = _watching()
    brain._oversight._watch_from_step = start + 200
    for step in range(start, start + 230):
        is_slow = step >= start + 200
        duration_us = usual_us * (1.05 if is_slow else 1.0)
        brain.step_finished(StepRecord(step, 50 if is_slow else 0, duration_us, None, None))
    assert _is_withdrawn(brain)


@pytest.mark.parametrize("seed", [1001, 1002])
def test_what_followed_a_slow_promotion_at_its_key_is_withdrawn_with_it(seed: int) -> None:
    """Anything but NCCL's choice for gathers slows computation down; a better gather must not shield the first."""
    place = fabric.load("ethernet_boxes").communicator(range(16))
    world = World("ethernet_boxes", place, GATHERS_AND_SCATTERS, seed=seed, compute_us=100_000.0)
    brain = make_brain(world)
    n_slow, compute_us = 0, world.compute_us
    for _ in range(120):
        is_slow = any(row.collective is Collective.all_gather for row in world.plan.rows)
        world.compute_us = compute_us * (1.02 if is_slow else 1.0)
        n_slow += is_slow
        play(world, brain, 1)
    assert n_slow <= 60
    by_kind = {state.key.collective: state.incumbent for state in brain._states}
    assert not by_kind[Collective.reduce_scatter].is_baseline


def _young_job(seed: int, step_noise: float, settings: BrainSettings | None = None) -> tuple[World, Brain]:
    """Gathers and scatters of one size, which both have something to gain."""
    place = fabric.load("ethernet_boxes").communicator(range(16))
    world = World("ethernet_boxes", place, GATHERS_AND_SCATTERS, seed=seed, compute_us=100_000.0, step_noise=step_noise)
    return world, make_brain(world, settings=settings)


@pytest.mark.parametrize("seed", range(3))
def test_what_ran_on_trial_and_is_promoted_is_watched_though_no_new_plan_comes(seed: int) -> None:
    """The plan with the trial goes on as the plan with the promotion: nothing tells of its adoption."""
    world, brain = _young_job(seed, 0.005, BrainSettings(budget_fraction=0.0))
    play(world, brain, 20)
    state = next(state for state in brain._states if state.key.collective is Collective.all_gather)
    faster = Candidate(Algorithm.pat, Protocol.simple, 4)
    brain._policy.begin_trial(state, faster, "earlier runs", (0.1, 0.05), is_trusted=True)
    while state.incumbent != faster:
        play(world, brain, 1)
    usual_us = world.compute_us
    for step in range(20):
        world.compute_us = usual_us * (1.03 if world.plan.rows else 1.0)
        plans = play(world, brain, 1)
        assert plans == [] or step > 0, "nothing else is to be tried here"
        if state.incumbent.is_baseline:
            break
    assert state.incumbent.is_baseline
    assert step <= 10


def test_a_key_whose_promotion_made_steps_slower_rests_and_an_innocent_one_does_not() -> None:
    world, brain = _young_job(1, 0.003)
    compute_us, n_slow = world.compute_us, 0
    for _ in range(REST_STEPS):
        is_slow = any(row.collective is Collective.all_gather for row in world.plan.rows)
        world.compute_us = compute_us * (1.03 if is_slow else 1.0)
        n_slow += is_slow
        play(world, brain, 1)
    by_kind = {state.key.collective: state for state in brain._states}
    assert by_kind[Collective.all_gather].incumbent.is_baseline
    assert by_kind[Collective.all_gather].quiet_until > REST_STEPS
    assert [by_kind[kind].n_withdrawn for kind in (Collective.all_gather, Collective.reduce_scatter)] == [1, 0]
    assert not by_kind[Collective.reduce_scatter].incumbent.is_baseline
    assert n_slow <= 20


@given(st.floats(1e-4, 1.0), st.floats(1.0, 10.0))
def test_the_noisier_steps_are_the_more_of_them_must_be_known(noise: float, factor: float) -> None:
    few, many = steps_to_know(noise), steps_to_know(noise * factor)
    assert LEAST_KNOWN_STEPS <= few <= many <= MOST_KNOWN_STEPS
    assert steps_to_know(0.005) == LEAST_KNOWN_STEPS
    assert LEAST_KNOWN_STEPS < steps_to_know(0.01) < steps_to_know(0.02) == MOST_KNOWN_STEPS


def test_a_gain_that_steps_do_not_show_speaks_against_a_promotion() -> None:
    noticed: dict[float, list[int]] = {0.0: [], 0.0025: []}
    for seed in range(100):
        rng = np.random.default_rng(seed)
        known, after = 10_000 * np.exp(rng.normal(0, 0.01, 20)), 10_175 * np.exp(rng.normal(0, 0.01, 60))
        for promised, found in noticed.items():
            guard = Guard()
            guard.changed(known.tolist(), promised=promised)
            found.append(next((at for at, us in enumerate(after, 1) if guard.step(us)), 61))
    assert np.quantile(noticed[0.0025], 0.9) <= 10 < np.quantile(noticed[0.0], 0.9)
