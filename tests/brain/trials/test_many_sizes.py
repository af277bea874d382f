"""Jobs whose message sizes differ from step to step, or are called seldom: their trials wait long for a first call."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
from zerotune.store.records import (
    BASELINE,
    Collective,
    CommunicatorClass,
    Phase,
)

MIB = 1 << 20


def _step(message_bytes: int) -> list[Call]:
    gather = [Call(Collective.all_gather, Phase.forward_gather, message_bytes)] * 4
    backward = [
        Call(Collective.all_gather, Phase.backward_gather, message_bytes),
        Call(Collective.reduce_scatter, Phase.gradient_scatter, message_bytes),
    ]
    return gather + backward * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "communicator", "compute_us"),
    [("as_believed", CommunicatorClass(8, 2), 5_000.0), ("rtx5090_loopback", CommunicatorClass(8, 8), 345_000.0)],
)
def test_a_new_size_in_every_step_costs_no_more_than_the_budget(
    name: str, communicator: CommunicatorClass, compute_us: float
) -> None:
    n_explored = 0
    for seed in range(2):
        sizes = 2 ** np.random.default_rng(seed).uniform(16, 27, 300)
        world = World(name, communicator, _step(MIB), compute_us=compute_us, seed=seed)
        brain = make_brain(world)
        lost_us = all_us = 0.0
        for message_bytes in sizes.astype(int).tolist():
            world.calls = _step(message_bytes)
            chosen_us = sum(world.truth(call, world.chosen(call))[0] for call in world.calls)
            usual_us = sum(world.truth(call, BASELINE)[0] for call in world.calls)
            lost_us += chosen_us - usual_us
            all_us += world.compute_us + usual_us
            play(world, brain, 1)
        n_explored += brain.n_explored
        assert lost_us <= 0.01 * all_us
    assert n_explored > 0, "one job in two may stop early: steps that differ in everything seem slower by chance"
