"""Training that changes by itself is no plan's doing: batch and bucket sizes, stages."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.brain_world import Call, World, decided, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Collective, Phase
from zerotune.tuner.learning.policy.trials.pace import MEMORY_STEPS, MOST_IN_DOUBT, N_DIFFERENT, N_IN_A_ROW, Pace

KINDS = (
    (Collective.all_gather, Phase.forward_gather),
    (Collective.reduce_scatter, Phase.gradient_scatter),
)


def _calls(exponents: tuple[int, ...]) -> list[Call]:
    return [Call(kind, phase, 1 << exponent) for exponent in exponents for kind, phase in KINDS] * 2


def _world(exponents: tuple[int, ...] = (17, 20, 23), seed: int = 0) -> World:
    place = fabric.load("ethernet_boxes").communicator(range(16))
    return World("ethernet_boxes", place, _calls(exponents), compute_us=100_000.0, seed=seed)


@given(
    st.lists(st.floats(-0.039, 0.039), min_size=1, max_size=80),
    st.lists(st.sampled_from("abc"), min_size=80, max_size=80),
)
def test_steps_that_scatter_as_they_do_have_no_other_pace(noises: list[float], settings: list[str]) -> None:
    pace = Pace()
    assert all(
        pace.step(setting, 0, 10.0 + 0.5 * noise, 0.0) is None for setting, noise in zip(settings, noises, strict=False)
    )


@pytest.mark.parametrize("shift", [-0.5, -0.05, 0.05, 0.5])
def test_another_pace_is_noticed_within_three_steps_and_once(shift: float) -> None:
    pace = Pace()
    assert not any(pace.step("ab"[at % 2], 0, 10.0, 0.005) for at in range(MEMORY_STEPS))
    found = [pace.step("ab"[at % 2], 0, 10.0 + shift, 0.005) for at in range(2 * MEMORY_STEPS)]
    assert found[N_IN_A_ROW - 1] == pytest.approx(shift)
    assert found.count(None) == len(found) - 1


def test_what_never_ran_before_says_nothing_about_the_pace() -> None:
    pace = Pace()
    assert not any(pace.step("before", 0, 10.0, 0.005) for _ in range(MEMORY_STEPS))
    assert not any(pace.step("new", 1, 10.3, 0.005) for _ in range(MEMORY_STEPS))


def test_several_new_settings_are_not_all_to_blame_unless_one_was_promoted() -> None:
    first = {}
    for n_promoted in (0, 1):
        pace = Pace()
        assert not any(pace.step("before", 0, 10.0, 0.005) for _ in range(MEMORY_STEPS))
        found = [pace.step(f"trial {at}", n_promoted, 10.3, 0.005) for at in range(MEMORY_STEPS)]
        first[n_promoted] = next(at for at, one in enumerate(found) if one is not None)
        assert not pace.is_in_doubt
    assert first[0] == N_DIFFERENT - 1
    assert first[1] >= MOST_IN_DOUBT, "the guard has its say before"


def test_stragglers_are_none() -> None:
    pace = Pace()
    slow = {20, 21, 40, 60, 61}
    assert not any(pace.step("always", 0, 10.4 if at in slow else 10.0, 0.005) for at in range(80))
    assert not pace.is_in_doubt


@pytest.mark.parametrize("n_slow", [1, 2])
def test_what_straggled_under_new_settings_is_no_yardstick(n_slow: int) -> None:
    """A trial's calls may still run in the first step after it: where that was all that the settings were known by,
    the normal steps after it were taken for another pace."""
    pace = Pace()
    assert not any(pace.step("before", 0, 10.0, 0.005) for _ in range(MEMORY_STEPS))
    assert not any(pace.step("after", 0, 10.2 if at < n_slow else 10.0, 0.005) for at in range(MEMORY_STEPS))


@pytest.mark.parametrize("factor", [0.6, 1.3, 2.0])
def test_another_batch_size_withdraws_nothing_that_was_promoted(factor: float) -> None:
    world = _world()
    brain = make_brain(world)
    play(world, brain, 60)  # not while the first trials are still on
    before = [state.incumbent for state in brain._states]
    assert any(not incumbent.is_baseline for incumbent in before)
    n_withdrawn = sum(state.n_withdrawn for state in brain._states)
    brain.decisions()
    world.compute_us *= factor
    play(world, brain, 12)
    assert "pace" in {decision.kind for decision in brain.decisions()}
    assert sum(state.n_withdrawn for state in brain._states) == n_withdrawn
    assert all(
        state.incumbent == incumbent
        for state, incumbent in zip(brain._states, before, strict=True)
        if not incumbent.is_baseline
    )


def test_a_promotion_that_slows_steps_is_still_withdrawn_right_after_a_change_of_pace() -> None:
    world = _world((17,), seed=3)
    brain = make_brain(world)
    play(world, brain, 12)
    assert all(state.incumbent.is_baseline for state in brain._states)
    world.compute_us *= 1.5
    usual_us = world.compute_us
    for _ in range(200):
        runs = any(row.collective is Collective.all_gather for row in world.plan.rows)
        world.compute_us = usual_us * (1.05 if runs else 1.0)
        play(world, brain, 1)
    assert any(state.n_withdrawn for state in brain._states if state.key.collective is Collective.all_gather)
    assert all(decided(brain)(call).is_baseline for call in world.calls if call.collective is Collective.all_gather)


def test_what_was_found_for_other_buckets_is_there_when_they_return() -> None:
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
