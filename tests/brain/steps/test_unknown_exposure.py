"""Where nothing tells what computation waits for: variants are tried, steps tell it, and the budget holds."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.agent.first_contact import world_of
from benchmarks.lib.simulated.brain_world import Call, OverlappedWorld, World, decided, make_brain, play
from benchmarks.lib.simulated.host_view import HostView, seen_as
from benchmarks.policy.brain_safety import zero_calls
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Collective, HowKnown, Phase

UNKNOWN = HostView(is_exposure_known=False)


def _hidden_job(view: HostView) -> OverlappedWorld:
    place = fabric.load("few_sms_node").communicator(range(8))
    kinds = (Collective.all_gather, Phase.forward_gather), (Collective.reduce_scatter, Phase.gradient_scatter)
    calls = [Call(*kind, 1 << exponent) for exponent in (22, 24) for kind in kinds for _ in range(3)]
    return OverlappedWorld("few_sms_node", place, calls, compute_us=40_000.0, view=view)


@pytest.mark.parametrize("host_ahead", [0, 3])
def test_variants_begin_and_steps_gain_though_exposure_is_unknown(host_ahead: int) -> None:
    world = _hidden_job(UNKNOWN._replace(host_ahead=host_ahead))
    default_us = np.median([world.run_step()[1].duration_us for _ in range(20)])
    brain = make_brain(world)
    play(world, brain, 500)
    assert "variant" in {one.kind for one in brain.decisions()}
    assert brain.spent_percent <= 1.0
    world.fixed = decided(brain)
    assert np.median([world.run_step()[1].duration_us for _ in range(20)]) < 0.98 * default_us


@pytest.mark.slow  # test_variants_begin_and_steps_gain_though_exposure_is_unknown sees variants begin
def test_variants_begin_while_it_is_in_doubt_whether_anything_hides() -> None:
    """Steps said 0.99, give or take 0.06, after the last trial, and nothing more: without a variant for good."""
    with seen_as(UNKNOWN):
        world = world_of("ethernet_boxes", 0)
        brain = make_brain(world)
        play(world, brain, 200)
    assert "variant" in {one.kind for one in brain.decisions()}


def _exposed_job(name: str, view: HostView) -> World:
    """A job that waits for all of its communication."""
    machine, calls = fabric.load(name), zero_calls((15, 18, 21, 24))
    world = World(name, machine.communicator(range(min(16, machine.max_ranks))), calls, seed=3, view=view)
    world.compute_us = sum(world.truth(call, BASELINE)[0] for call in calls)
    return world


@pytest.mark.parametrize("name", ["h100_node", "ethernet_boxes"])
def test_steps_tell_that_all_is_waited_for(name: str) -> None:
    world = _exposed_job(name, UNKNOWN)
    brain = make_brain(world)
    assert brain.exposure.how == HowKnown.unknown
    assert (brain.exposure.least, brain.exposure.most) == (0.0, 1.0)
    play(world, brain, 200)
    assert brain.exposure.how == HowKnown.estimated
    assert brain.exposure.least > 0.7
    assert brain.exposure.most == 1.0


def test_steps_tell_that_nothing_is_waited_for() -> None:
    calls = zero_calls((15, 18, 21, 24))
    world = OverlappedWorld("h100_node", fabric.load("h100_node").communicator(range(8)), calls, view=UNKNOWN)
    world.compute_us = 4.0 * sum(world.truth(call, BASELINE)[0] for call in calls)
    brain = make_brain(world)
    play(world, brain, 200)
    assert brain.exposure.how == HowKnown.estimated
    assert brain.exposure.least == 0.0
    assert brain.exposure.most < 0.7


def test_measured_exposure_is_not_estimated() -> None:
    world = _exposed_job("h100_node", HostView())
    brain = make_brain(world)
    play(world, brain, 20)
    assert brain.exposure.how == HowKnown.measured
    assert brain.exposure.least == brain.exposure.most


@pytest.mark.parametrize("is_exposure_known", [True, False])
@pytest.mark.parametrize("make", [_exposed_job, lambda _, view: _hidden_job(view)])
def test_the_true_cost_of_exploring_is_within_the_budget(make: object, is_exposure_known: bool) -> None:
    """What steps take longer than with NCCL's own choice, as the truth tells."""
    world = make("h100_node", HostView(is_exposure_known=is_exposure_known))  # type: ignore[operator] # the fixture is untyped
    brain = make_brain(world)
    usual_us, longer_us, n_steps = np.median([world.run_step()[1].duration_us for _ in range(20)]), 0.0, 300
    for _ in range(n_steps):
        block, record = world.run_step()
        longer_us += max(0.0, record.duration_us - 1.02 * usual_us)
        world.tell(brain, block, record)
        world.follow(brain.propose(), brain)
    assert longer_us <= 0.01 * n_steps * usual_us
