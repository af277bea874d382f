"""What a brain shows of itself: what runs, why, and what is believed; looking changes nothing."""

from __future__ import annotations

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
from benchmarks.lib.simulated.earlier_jobs import key_of
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Collective, Phase

CALLS = [Call(Collective.all_gather, Phase.forward_gather, 1 << exponent) for exponent in (17, 20)] * 2


def _world(calls: list[Call] = CALLS) -> World:
    place = fabric.load("ethernet_boxes").communicator(range(16))
    return World("ethernet_boxes", place, calls, compute_us=100_000.0)


def test_what_is_shown_is_what_runs_and_nothing_changes_by_looking() -> None:
    world, unseen = _world(), _world()
    brain, left_alone = make_brain(world), make_brain(unseen)
    for _ in range(60):
        play(world, brain, 1)
        play(unseen, left_alone, 1)
        assert world.plan.rows == unseen.plan.rows
        plan = brain.plan
        assert plan is not None
        views = {one.key: one for one in brain.keys}
        for call in world.calls:
            key = key_of(world, call)
            view, predicted = views[key], brain.predicted(key)
            asked = plan.settings.get(key, BASELINE)
            if plan.plan.epoch == world.plan.epoch:
                assert asked == world.chosen(call)
            assert asked in {view.trial, view.usual, view.incumbent}
            assert {view.usual, view.incumbent} <= predicted.keys()
            for option in predicted.values():
                assert (option.measured_us is None) == (option.n_calls == 0)
                assert option.us > 0.0 < option.std
    assert brain.decisions() == left_alone.decisions()
    assert any(not one.incumbent.is_baseline for one in brain.keys)
