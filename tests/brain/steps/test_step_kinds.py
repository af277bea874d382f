"""Steps that move more than others take longer, whatever their settings; steps may also scatter far by themselves."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, Varying, gain_share, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Collective, Phase
from zerotune.tuner.learning.brain import Brain
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


def test_steps_that_move_as_much_are_as_they_are() -> None:
    kinds = StepKinds()
    for step, moved in enumerate([TRAINING, 1.05 * TRAINING, TRAINING, 0.97 * TRAINING]):
        kinds.moved_bytes.add(np.array([step]), np.array([moved]))
        assert kinds.usual_us(step, 100.0 + step) == pytest.approx(100.0 + step)


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


def test_what_slows_a_kind_down_is_not_explained_away() -> None:
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


@pytest.mark.parametrize("seed", [0, 1])
def test_computation_of_two_lengths_is_no_new_pace_in_every_other_step(seed: int) -> None:
    """Three long steps in a row come by chance; a job that starts over each time would never try anything."""
    world = _world("h100_ib_2", seed, "two_lengths")
    brain = make_brain(world)
    play(world, brain, 300)
    assert sum(one.kind == "pace" for one in brain.decisions()) <= 6
    default_us = sum(world.truth(call, BASELINE)[0] for call in world.whole)
    chosen_us = sum(world.truth(call, world.chosen(call))[0] for call in world.whole)
    assert chosen_us < 0.96 * default_us


class Late(Varying):
    """A busy machine: by chance, a part of what a step measured is joined some steps later, or much later."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.later: list[tuple[int, np.ndarray]] = []

    def measured(self, brain: Brain, block: np.ndarray) -> None:
        chance = np.random.default_rng((self.seed, self.step, 1))
        n_now = chance.integers(0, len(block))
        self.later.append((self.step + chance.integers(0, 9), block[n_now:]))
        brain.observe(block[:n_now])
        due = [late for at, late in self.later if at <= self.step]
        self.later = [(at, late) for at, late in self.later if at > self.step]
        for late in due:
            brain.observe(late)


@pytest.mark.slow
def test_measurements_that_come_late_make_no_kinds() -> None:
    """What a step moves is told by what rank 0 enqueued; a job whose steps are all alike is judged by all of them."""
    gains = []
    for type_of in (Varying, Late):
        world = _world("ethernet_boxes", 5, "steady", type_of)
        brain = make_brain(world)
        play(world, brain, 280)
        assert sum(one.kind == "promote" for one in brain.decisions()) >= 2
        own_us, _, ours_us = map(sum, zip(*gain_share(world, brain).values(), strict=True))
        gains.append(own_us - ours_us)
    assert gains[1] > 0.8 * gains[0] > 0.0
