"""Steps that move more than others take longer, whatever their settings; steps may also scatter far by themselves."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, Varying, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Collective, Phase
from zerotune.tuner.learning.policy.step_effects import ENOUGH, StepKinds

KINDS = (
    (Collective.all_gather, Phase.forward_gather),
    (Collective.reduce_scatter, Phase.gradient_scatter),
)
TRAINING, VALIDATION = 1_000_000, 100_000


def _play(kinds: StepKinds, steps: range, moved: int, duration_us: float) -> list[float | None]:
    found = []
    for step in steps:
        if moved:
            kinds.moved_bytes.add(np.full(2, step), np.full(2, moved // 2))
        found.append(kinds.usual_us(step, duration_us))
    return found


@pytest.mark.parametrize("moved", [VALIDATION, 0])
def test_another_kind_counts_once_it_is_known_how_it_differs(moved: int) -> None:
    """Of a replayed graph nothing is seen."""
    kinds = StepKinds()
    _play(kinds, range(10), TRAINING, 100.0)
    found = _play(kinds, range(10, 20), moved, 30.0)
    assert found[: ENOUGH - 1] == [None] * (ENOUGH - 1)
    assert found[ENOUGH - 1 :] == [pytest.approx(100.0)] * (10 - ENOUGH + 1)


def test_validation_before_training_and_what_nobody_saw_are_no_yardstick() -> None:
    for n_first, moved in ((2, VALIDATION), (30, 0)):
        kinds = StepKinds()
        _play(kinds, range(n_first), moved, 5000.0)
        assert _play(kinds, range(n_first, 40), TRAINING, 100.0) == [pytest.approx(100.0)] * (40 - n_first)


def test_a_slower_kind_of_step_is_noticed() -> None:
    """Steps of the yardstick are never moved; those of another not while it runs alone."""
    kinds = StepKinds()
    for at in range(0, 60, 20):
        _play(kinds, range(at, at + 10), TRAINING, 100.0)
        _play(kinds, range(at + 10, at + 20), VALIDATION, 30.0)
    assert _play(kinds, range(60, 160), TRAINING, 110.0) == [pytest.approx(110.0)] * 100
    slower = _play(kinds, range(160, 164), VALIDATION, 33.0)
    assert slower == [pytest.approx(110.0)] * 4
    _play(kinds, range(164, 260), VALIDATION, 33.0)
    assert _play(kinds, range(260, 300), VALIDATION, 36.3)[-1] == pytest.approx(121.0)


def _world(name: str, seed: int, kind: str, type_of: type[Varying] = Varying) -> Varying:
    place = fabric.load(name).communicator(range(16))
    calls = [Call(*one, n_bytes) for n_bytes in (1 << 15, 1 << 18, 1 << 21, 1 << 24) for one in KINDS for _ in (1, 2)]
    world = type_of(name, place, calls, seed=seed, kind=kind, whole=calls)
    world.compute_us = sum(world.truth(call, BASELINE)[0] for call in calls)
    return world


@pytest.mark.slow
@pytest.mark.parametrize("seed", [101, 102])
def test_batches_of_several_sizes_make_no_setting_guilty(seed: int) -> None:
    """What is tried at large messages alone runs in the longest steps."""
    world = _world("ethernet_boxes", seed, "batches")
    brain = make_brain(world)
    play(world, brain, 400)
    assert brain.spent_percent < 1.0
    assert not any(one.n_withdrawn for one in brain.keys)


def test_computation_of_two_lengths_is_no_new_pace_in_every_other_step() -> None:
    """Three long steps in a row come by chance; a job that starts over each time would never try anything."""
    world = _world("h100_ib_2", 0, "two_lengths")
    brain = make_brain(world)
    play(world, brain, 300)
    assert sum(one.kind == "pace" for one in brain.decisions()) <= 6
    default_us = sum(world.truth(call, BASELINE)[0] for call in world.whole)
    chosen_us = sum(world.truth(call, world.chosen(call))[0] for call in world.whole)
    assert chosen_us < 0.96 * default_us
