"""The whole loop against a fabric's truth: converges, stays in its budget, proposes legal plans only."""

from __future__ import annotations

import pytest
from brain_world import Call, World, gain_share, make_brain, play

from agent.nccl import catalog, fabric
from store.records import Collective, Phase

SIZES = (1 << 14, 1 << 17, 1 << 20, 1 << 23)


def _world(**changes: object) -> World:
    place = fabric.load("ethernet_boxes").communicator(range(16))
    calls = [
        call
        for nbytes in SIZES
        for call in [Call(Collective.all_gather, Phase.forward_gather, nbytes)] * 2
        + [Call(Collective.reduce_scatter, Phase.gradient_scatter, nbytes)] * 2
    ]
    return World("ethernet_boxes", place, calls, **{"compute_us": 100_000.0, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1])
def test_finds_the_attainable_gain_within_its_budget(seed: int) -> None:
    world = _world(seed=seed)
    brain = make_brain(world)
    plans = play(world, brain, 150)
    found = gain_share(world, brain).values()
    attainable = sum(base - best for base, best, _ in found)
    gained = sum(base - chosen for base, _, chosen in found)
    assert gained >= 0.95 * attainable > 0
    assert brain.spent_percent <= 1.0
    epochs = [plan.epoch for plan in plans]
    assert epochs == sorted(set(epochs))
    legal = set(catalog.legal_cells(Collective.all_gather, n_nodes=16, n_ranks=16))
    for plan in plans:
        for row in plan.rows:
            assert (row.candidate.algorithm, row.candidate.protocol) in legal
            assert 1 <= row.candidate.n_channels <= world.topology.comm_channels
            assert row.min_bytes <= row.max_bytes
