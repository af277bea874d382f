"""Steps that move more than others take longer, whatever their settings; steps may also scatter far by themselves."""

from __future__ import annotations

import pytest

from benchmarks.lib.simulated.brain_world import Call, Varying, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Collective, Phase

KINDS = (
    (Collective.all_gather, Phase.forward_gather),
    (Collective.reduce_scatter, Phase.gradient_scatter),
)
TRAINING, VALIDATION = 1_000_000, 100_000


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
