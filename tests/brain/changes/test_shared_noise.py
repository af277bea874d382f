"""Noise that neighbouring steps share promotes nothing."""

from __future__ import annotations

from benchmarks.lib.simulated.brain_world import Unsteady, make_brain, play, zero3_step
from zerotune.store.records import CommunicatorClass

NODE = CommunicatorClass(8, 1)


def test_congestion_that_comes_and_goes_promotes_nothing() -> None:
    n_promoted = n_explored = 0
    for seed in range(3):
        world = Unsteady("h100_node", NODE, zero3_step(n_ranks=8), seed=seed, flat=True, kind="congestion")
        brain = make_brain(world)
        play(world, brain, 300)
        n_promoted += sum(one.kind == "promote" for one in brain.decisions())
        n_explored += brain.n_explored
    assert n_explored > 60
    assert n_promoted == 0
