"""--tune-for freezes a job's settings; --compare compares more of its steps with NCCL's own choice."""

from __future__ import annotations

import pytest

from benchmarks.lib.simulated.brain_world import World, make_brain, play, zero3_step
from zerotune.agent.nccl import fabric
from zerotune.store.records import DecisionKind
from zerotune.tuner.learning.brain import Brain, BrainSettings


def job(settings: BrainSettings) -> tuple[World, Brain]:
    place = fabric.load("ethernet_boxes").communicator(range(16))
    world = World("ethernet_boxes", place, zero3_step(shard_bytes=1 << 14))
    return world, make_brain(world, settings=settings)


def n_windows(brain: Brain) -> int:
    return sum(one.kind == DecisionKind.control for one in brain.decisions())


def test_after_so_many_steps_what_runs_stays() -> None:
    world, brain = job(BrainSettings(control_share=0.001, tune_steps=120))
    assert play(world, brain, 120), "until then settings are tried"
    play(world, brain, 40)  # what was on trial ends
    before = world.plan
    told = brain.decisions()  # those of until then
    (frozen,) = (one for one in told if one.kind == DecisionKind.freeze)
    assert 120 <= (frozen.step or 0) < 160
    assert before.rows
    assert [plan for plan in play(world, brain, 300) if plan.rows != before.rows] == []
    assert not brain.decisions()


@pytest.mark.slow  # test_short_steps_get_several_control_windows_in_one_plan asks for as many
def test_more_steps_are_compared_if_that_is_asked_for() -> None:
    found = {}
    for compared in (0, 200):
        world, brain = job(BrainSettings(control_share=0.001, compare_steps=compared))
        play(world, brain, 600)
        found[compared] = n_windows(brain)
    assert found[0] < 20 <= found[200]


def test_the_first_steps_are_nccls_own_where_starts_are_compared_by_them() -> None:
    world, brain = job(BrainSettings(own_steps=24))
    assert not play(world, brain, 20)
    assert play(world, brain, 100), "then settings are tried"
