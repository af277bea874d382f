"""Training that changes by itself is no plan's doing: batch and bucket sizes, stages."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, World, decided, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Collective, Phase, StepRecord

KINDS = (
    (Collective.all_gather, Phase.forward_gather),
    (Collective.reduce_scatter, Phase.gradient_scatter),
)


def _calls(exponents: tuple[int, ...]) -> list[Call]:
    return [Call(kind, phase, 1 << exponent) for exponent in exponents for kind, phase in KINDS] * 2


def _world(exponents: tuple[int, ...] = (17, 20, 23), seed: int = 0) -> World:
    place = fabric.load("ethernet_boxes").communicator(range(16))
    return World("ethernet_boxes", place, _calls(exponents), compute_us=100_000.0, seed=seed)


@pytest.mark.parametrize("factor", [0.6, 1.3, 2.0])
def test_another_batch_size_withdraws_nothing_that_was_promoted(factor: float) -> None:
    world = _world()
    brain = make_brain(world)
    play(world, brain, 60)  # not while the first trials are still on
    before = [state.incumbent for state in brain.keys]
    assert any(not incumbent.is_baseline for incumbent in before)
    n_withdrawn = sum(state.n_withdrawn for state in brain.keys)
    brain.decisions()
    world.compute_us *= factor
    play(world, brain, 12)
    assert "pace" in {decision.kind for decision in brain.decisions()}
    assert sum(state.n_withdrawn for state in brain.keys) == n_withdrawn
    assert all(
        state.incumbent == incumbent
        for state, incumbent in zip(brain.keys, before, strict=True)
        if not incumbent.is_baseline
    )


def test_a_promotion_that_slows_steps_is_still_withdrawn_right_after_a_change_of_pace() -> None:
    world = _world((17,), seed=3)
    brain = make_brain(world)
    play(world, brain, 12)
    assert all(state.incumbent.is_baseline for state in brain.keys)
    world.compute_us *= 1.5
    usual_us = world.compute_us
    for _ in range(200):
        runs = any(row.collective is Collective.all_gather for row in world.plan.rows)
        world.compute_us = usual_us * (1.05 if runs else 1.0)
        play(world, brain, 1)
    assert any(state.n_withdrawn for state in brain.keys if state.key.collective is Collective.all_gather)
    assert all(decided(brain)(call).is_baseline for call in world.calls if call.collective is Collective.all_gather)


def test_settings_found_for_other_buckets_are_there_when_they_return() -> None:
    world = _world()
    brain = make_brain(world)
    play(world, brain, 80)
    before = {call: decided(brain)(call) for call in world.calls}
    assert any(not candidate.is_baseline for candidate in before.values())
    world.calls = _calls((16, 19, 22))
    play(world, brain, 80)
    assert any(not decided(brain)(call).is_baseline for call in world.calls), "other buckets are tuned, too"
    world.calls = _calls((17, 20, 23))
    play(world, brain, 1)
    kept = [decided(brain)(call) == candidate for call, candidate in before.items() if not candidate.is_baseline]
    assert all(kept)
    assert math.isfinite(brain.spent_percent)
    assert brain.spent_percent <= 1.0
    assert np.isfinite(world.run_step()[1].duration_us)


@pytest.mark.parametrize(("place", "looks_every"), [("ethernet_boxes", 1), ("h100_ib_16", 5)])
@pytest.mark.parametrize("seed", [3, 6])
def test_gains_are_no_other_pace(place: str, looks_every: int, seed: int) -> None:
    """Nearly all of a step is communication, so that it gets far shorter while many settings take turns."""
    world = World(place, fabric.load(place).communicator(range(16)), _calls((17, 18, 19)), seed=seed, step_noise=0.003)
    world.compute_us = 0.15 * sum(world.truth(call, BASELINE)[0] for call in world.calls)
    brain = make_brain(world)
    first_us = world.run_step()[1].duration_us
    play(world, brain, 200, latency_steps=2, looks_every=looks_every)
    assert world.run_step()[1].duration_us < 0.95 * first_us
    assert not [one for one in brain.decisions() if one.kind == "pace"]


def test_steps_that_call_nothing_may_have_any_pace() -> None:
    world = _world()
    brain = make_brain(world)
    for step in range(60):
        brain.step_finished(StepRecord(step, 0, 1_000.0 if step < 30 else 5_000.0))
        assert brain.propose() is None
    assert brain.decisions() == []
