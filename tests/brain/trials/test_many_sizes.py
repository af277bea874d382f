"""Jobs whose message sizes differ from step to step, or are called seldom: their trials wait long for a first call."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
from zerotune.store.records import BASELINE, Collective, CommunicatorClass, Phase
from zerotune.tuner.learning.policy.risk import ExposedShare

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


def test_the_share_that_is_exposed_is_right_where_steps_differ() -> None:
    exposed = ExposedShare()
    rng = np.random.default_rng(0)
    assert exposed.bounds == (0.0, 1.0)
    for step in range(200):
        calls_us = np.exp(rng.uniform(2.0, 8.0, 3))
        at = [exposed.measured, exposed.finished]
        for report in at if step % 2 else at[::-1]:
            if report == exposed.measured:
                exposed.measured(np.full(3, step), calls_us)
            else:
                exposed.finished(step, 0.9 * float(calls_us.sum()))
    assert exposed.share == pytest.approx(0.9, abs=0.005)
    assert exposed.bounds == (exposed.share, exposed.share)


def test_steps_of_which_only_half_is_told_teach_nothing_and_are_forgotten() -> None:
    exposed = ExposedShare()
    for step in range(5000):
        if step % 2:
            exposed.measured(np.array([step]), np.array([10.0]))
        else:
            exposed.finished(step, 1.0)
    assert not exposed.is_measured
    for step in range(0, 2500, 2):  # what is missing of them comes when they are forgotten
        exposed.measured(np.array([step]), np.array([10.0]))
    assert not exposed.is_measured
    exposed.measured(np.array([4998]), np.array([10.0]))
    assert exposed.is_measured
