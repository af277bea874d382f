"""A promotion under watch does not answer for what a trial of something else at its key costs."""

from __future__ import annotations

import numpy as np
import pytest
from brain_world import Call, World, make_brain, play

from agent.nccl import fabric
from store.records import Algorithm, Candidate, Collective, Phase, Plan, Protocol, StepRecord
from tuner.brain import Brain, BrainSettings
from tuner.policy.plans import PlanInForce

PROMOTED = Candidate(Algorithm.ring, Protocol.simple, 4)
TRIED = Candidate(Algorithm.ring, Protocol.ll, 4)


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


def test_what_it_costs_itself_is() -> None:
    brain, start, usual_us = _watching()
    for step in range(start, start + 50):
        is_trial = (step - start) % 10 >= 3
        duration_us = usual_us * (1.3 if is_trial else 1.05)
        brain.step_finished(StepRecord(step, 51 if is_trial else 50, duration_us, None, None))
    assert any("slower with it" in decision.reason for decision in brain.decisions())


def test_steps_of_before_the_change_end_no_watch() -> None:
    """Records may come hundreds at a time, after the change that they do not know of."""
    brain, start, usual_us = _watching()
    brain._oversight._watch_from_step = start + 200
    for step in range(start, start + 230):
        is_slow = step >= start + 200
        brain.step_finished(StepRecord(step, 50, usual_us * (1.05 if is_slow else 1.0), None, None))
    assert any("slower with it" in decision.reason for decision in brain.decisions())


@pytest.mark.parametrize("seed", [1001, 1002])
def test_what_followed_a_slow_promotion_at_its_key_is_withdrawn_with_it(seed: int) -> None:
    """Anything but NCCL's choice for gathers slows computation down; a better gather must not shield the first."""
    place = fabric.load("ethernet_boxes").communicator(range(16))
    calls = [
        call
        for kind, phase in (
            (Collective.all_gather, Phase.forward_gather),
            (Collective.reduce_scatter, Phase.gradient_scatter),
        )
        for call in [Call(kind, phase, 1 << 17)] * 2
    ]
    world = World("ethernet_boxes", place, calls, seed=seed, compute_us=100_000.0)
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
