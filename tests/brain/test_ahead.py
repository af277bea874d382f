"""What larger messages than any before run with, when memory became free."""

from __future__ import annotations

import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
from benchmarks.lib.simulated.earlier_jobs import knowledge
from zerotune.store.records import (
    BASELINE,
    SIZE_CLASSES_PER_OCTAVE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Phase,
    PlanRow,
    Protocol,
    size_class,
    size_class_floor,
)
from zerotune.tuner.learning.brain import Brain, BrainSettings

MIB = 1 << 20
NODE = CommunicatorClass(8, 1)


def _reduced(n_bytes: int) -> Call:
    return Call(Collective.all_reduce, Phase.gradient_scatter, n_bytes)


def _freed(
    n_bytes: int = MIB, fabric: str = "h100_node", place: CommunicatorClass = NODE, seed: int = 0
) -> tuple[World, Brain]:
    """A job that let go of some memory, and has found something faster since."""
    world = World(fabric, place, [_reduced(n_bytes)] * 4, seed=seed, memory_pressure=0.97)
    brain = make_brain(world)
    play(world, brain, 20)
    world.memory_pressure = 0.6
    play(world, brain, 100)
    return world, brain


def _unseen_sizes(brain: Brain) -> list[PlanRow]:
    """Rows of the newest plan for larger messages than any before."""
    assert brain.plan is not None
    largest = max(one.key.size_class for one in brain.keys)
    rows = [row for row in brain.plan.plan.rows if row.min_bytes >= size_class_floor(largest + 1)]
    assert all(row.phase is None for row in rows), "the phase of a size's first call is not known"
    return rows


def test_the_first_larger_message_runs_with_a_faster_setting() -> None:
    world, brain = _freed()
    larger = _reduced(2 * MIB)
    found = world.chosen(larger)
    assert world.truth(larger, found)[0] < 0.8 * world.truth(larger, BASELINE)[0]
    world.calls = [larger] * 4
    play(world, brain, 60)
    assert world.truth(larger, brain.keys[1].usual)[0] <= world.truth(larger, found)[0]


@pytest.mark.parametrize(
    ("fabric", "place", "log2_bytes"),
    [
        ("h100_node", NODE, 20),  # NCCL goes over from ring/LL to NVLS
        ("ethernet_boxes", CommunicatorClass(16, 16), 22),  # a tree's lead shrinks, by more than NCCL's costs say
        ("few_sms_node", NODE, 19),
    ],
)
def test_without_a_faster_setting_nccl_keeps_a_size(fabric: str, place: CommunicatorClass, log2_bytes: int) -> None:
    for seed in range(3):
        world, brain = _freed(1 << log2_bytes, fabric, place, seed)
        rows = _unseen_sizes(brain)
        assert (rows[0].min_bytes, rows[-1].max_bytes) == (
            size_class_floor(size_class(1 << log2_bytes) + 1),
            size_class_floor(size_class(1 << log2_bytes) + 1 + 2 * SIZE_CLASSES_PER_OCTAVE) - 1,
        )
        for times in (1.2, 1.5, 2, 2.5, 3, 4, 4.7):
            larger = _reduced(int(times * (1 << log2_bytes)))
            assert world.truth(larger, world.chosen(larger))[0] < 1.02 * world.truth(larger, BASELINE)[0], times


def test_later_findings_change_guesses() -> None:
    """Calls may become slower with what was faster."""
    world, brain = _freed()
    guessed = {row.candidate for row in _unseen_sizes(brain)} - {BASELINE}
    assert guessed == {brain.keys[0].usual}
    world.factors.update({(world.calls[0], one): 3.0 for one in guessed})
    while brain.keys[0].usual in guessed:
        assert world.step < 300
        play(world, brain, 1)
    play(world, brain, 2)
    assert not guessed & {row.candidate for row in _unseen_sizes(brain)}


def test_sizes_where_nccl_changes_algorithm_are_left_alone() -> None:
    world, brain = _freed()
    assert _unseen_sizes(brain)
    for row in _unseen_sizes(brain):
        for n_bytes in (row.min_bytes, row.max_bytes):
            default = brain.costs.default(world.communicator, row.collective, n_bytes)
            assert default is not None
            changes = (default.algorithm, default.protocol) != (Algorithm.ring, Protocol.ll)
            assert row.candidate.is_baseline or not changes


def test_without_a_description_larger_messages_are_left_to_nccl() -> None:
    world = World("h100_node", NODE, [_reduced(MIB)] * 4, memory_pressure=0.97)
    faster = Candidate(Algorithm.ring, Protocol.simple, 8)
    world.factors[world.calls[0], faster] = 0.6 * world.truth(world.calls[0], BASELINE)[0] / world.truth(
        world.calls[0], faster
    )[0]
    known = knowledge(world, promising={(world.calls[0], faster): 0.4})
    brain = Brain("job", "", {}, known, BrainSettings(), clock=lambda: 0.0)
    play(world, brain, 20)
    world.memory_pressure = 0.6
    while brain.keys[0].usual.is_baseline:
        assert world.step < 200
        play(world, brain, 1)
    play(world, brain, 2)
    assert all(row.candidate.is_baseline for row in _unseen_sizes(brain))
