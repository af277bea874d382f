"""Training that changes by itself is no plan's doing: batch and bucket sizes, stages."""

from __future__ import annotations

import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import Collective, Phase

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
