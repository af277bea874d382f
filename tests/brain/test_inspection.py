"""What a brain shows of itself: what runs, why, and what is believed; looking changes nothing."""

from __future__ import annotations

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
from benchmarks.lib.simulated.earlier_jobs import key_of, knowledge, offer_only
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, Phase, Protocol

CALLS = [Call(Collective.all_gather, Phase.forward_gather, 1 << exponent) for exponent in (17, 20)] * 2
PAT = Candidate(Algorithm.pat, Protocol.simple, 4)


def _world(calls: list[Call] = CALLS) -> World:
    place = fabric.load("ethernet_boxes").communicator(range(16))
    return World("ethernet_boxes", place, calls, compute_us=100_000.0)


def test_the_inspection_shows_what_runs_and_changes_nothing() -> None:
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


def test_a_setting_of_earlier_jobs_is_seen_on_its_way_to_become_the_incumbent() -> None:
    call = CALLS[0]
    kinds = []
    for kind in ("promising", "provisional", "proven"):
        world = _world([call] * 2)
        brain = make_brain(world, knowledge(world, **{kind: {(call, PAT): 0.2}}))
        offer_only(world, brain, PAT)
        seen = []
        for _ in range(60):
            play(world, brain, 1)
            (view,) = brain.keys
            role = {view.trial: "trial", view.provisional: "provisional", view.incumbent: "incumbent"}.get(PAT)
            if role is not None and role not in seen:
                seen.append(role)
            assert view.provisional_is_proven == (kind == "proven") or view.provisional is None
        assert view.is_watched
        assert [one.kind for one in brain.decisions() if one.candidate == PAT][-1] == "promote"
        assert view.tried == (PAT,)
        assert brain.predicted(view.key)[PAT].n_calls > 0
        kinds.append(seen)
    assert kinds == [["trial", "incumbent"], ["provisional", "incumbent"], ["provisional", "incumbent"]]
