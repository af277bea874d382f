"""Withdrawn is what makes steps slower, whatever its calls say; what slows steps down otherwise is not its doing."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import Collective, Phase
from zerotune.tuner.learning.brain import Brain

GATHER = Call(Collective.all_gather, Phase.forward_gather, 1 << 17)
"""For gathers, by their calls."""


def _world(seed: int, step_noise: float) -> World:
    """Gathers and scatters of one size, which both have something to gain."""
    place = fabric.load("ethernet_boxes").communicator(range(16))
    calls = [*[GATHER] * 2, *[Call(Collective.reduce_scatter, Phase.gradient_scatter, 1 << 17)] * 2]
    return World("ethernet_boxes", place, calls, seed=seed, compute_us=100_000.0, step_noise=step_noise)


def _play_slowed(world: World, brain: Brain, n_steps: int, slowdown: float) -> int:
    """Steps are slower while gathers run anything but NCCL's choice; how many did."""
    compute_us, n_slow = world.compute_us, 0
    for _ in range(n_steps):
        is_slow = any(row.collective is Collective.all_gather for row in world.plan.rows)
        world.compute_us = compute_us * (slowdown if is_slow else 1.0)
        n_slow += is_slow
        play(world, brain, 1)
    world.compute_us = compute_us
    return n_slow


@pytest.mark.parametrize("step_noise", [0.003, 0.01])
def test_what_slows_steps_down_is_withdrawn_soon_and_what_came_with_it_stays(step_noise: float) -> None:
    n_slow, n_guilty, n_innocent, n_kept = [], 0, 0, 0
    for seed in range(1000, 1010):
        world = _world(seed, step_noise)
        brain = make_brain(world)
        n_slow.append(_play_slowed(world, brain, 120, 1.03))
        by_kind = {one.key.collective: one for one in brain.keys}
        gathers, scatters = by_kind[Collective.all_gather], by_kind[Collective.reduce_scatter]
        n_guilty += gathers.n_withdrawn > 0 and gathers.incumbent.is_baseline
        n_innocent += scatters.n_withdrawn > 0
        n_kept += not scatters.incumbent.is_baseline
    assert n_guilty >= 9
    assert n_kept >= 9
    assert n_innocent <= 1
    assert np.median(n_slow) <= 15
    assert np.quantile(n_slow, 0.9) <= 30
