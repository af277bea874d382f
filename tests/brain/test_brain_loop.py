"""The whole loop against a fabric's truth: converges, stays in its budget, proposes legal plans only."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.lib.simulated.brain_world import (
    Call,
    OverlappedWorld,
    SeeminglyHidden,
    World,
    decided,
    gain_share,
    make_brain,
    play,
)
from zerotune.agent.nccl import catalog, fabric
from zerotune.store.records import BASELINE, Collective, CommunicatorClass, Phase, Plan
from zerotune.tuner.learning.policy.observations import HORIZON_STEPS
from zerotune.tuner.learning.policy.risk import LEAST_TRIAL_STEPS

SIZES = (1 << 14, 1 << 17, 1 << 20, 1 << 23)


def _world(fabric_name: str = "ethernet_boxes", sizes: tuple[int, ...] = SIZES, **changes: object) -> World:
    place = fabric.load(fabric_name).communicator(range(16))
    calls = [
        call
        for nbytes in sizes
        for call in [Call(Collective.all_gather, Phase.forward_gather, nbytes)] * 2
        + [Call(Collective.reduce_scatter, Phase.gradient_scatter, nbytes)] * 2
    ]
    return World(fabric_name, place, calls, **{"compute_us": 100_000.0, **changes})


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


def test_the_best_setting_in_training_is_found_not_the_fastest_alone() -> None:
    machine = fabric.load("few_sms_node")
    place = machine.communicator(range(machine.ranks_per_node))
    calls = [
        call
        for nbytes in (1 << 22, 1 << 24, 1 << 26)
        for call in [Call(Collective.all_gather, Phase.backward_gather, nbytes)] * 3
        + [Call(Collective.reduce_scatter, Phase.gradient_scatter, nbytes)] * 3
    ]
    world = OverlappedWorld("few_sms_node", place, calls, compute_us=30_000.0)
    before_us = sum(world.run_step()[1].duration_us for _ in range(20))
    brain = make_brain(world)
    play(world, brain, 500)
    world.fixed = decided(brain)
    after_us = sum(world.run_step()[1].duration_us for _ in range(20))
    assert after_us < 0.95 * before_us
    call = max(calls, key=lambda one: one.message_bytes)
    alone = {option: world.truth(call, option)[0] for option in brain.costs.candidates(place, call.collective)}
    chosen = world.chosen(call)
    assert chosen != min(alone, key=lambda option: alone[option])
    assert chosen.n_channels < world.setting(call, BASELINE).n_channels
    assert brain.spent_percent <= 1.0


@pytest.mark.parametrize(("looks_every", "n_sizes"), [(1, 1), (9, 1), (3, 4)])
def test_channels_that_slow_computation_down_are_given_back_however_rarely_the_daemon_looks(
    looks_every: int, n_sizes: int
) -> None:
    """No call gains by another setting here, so that nothing pays for trials."""
    calls = [
        Call(collective, phase, 1 << (22 + size))
        for size in range(n_sizes)
        for collective, phase in (
            (Collective.all_gather, Phase.forward_gather),
            (Collective.all_gather, Phase.backward_gather),
            (Collective.reduce_scatter, Phase.gradient_scatter),
        )
        for _ in range(4)
    ]
    calls.append(Call(Collective.all_reduce, Phase.other, 1 << 12))
    world = OverlappedWorld("few_sms_node", CommunicatorClass(2, 1), calls)
    world.compute_us = 2.2 * sum(world.truth(call, BASELINE)[0] for call in calls)
    before_us = sum(world.run_step()[1].duration_us for _ in range(20))
    brain = make_brain(world)
    play(world, brain, 300, latency_steps=2, looks_every=looks_every)
    world.fixed = decided(brain)
    after_us = sum(world.run_step()[1].duration_us for _ in range(20))
    assert after_us < 0.92 * before_us
    assert brain.spent_percent <= 1.0


def test_while_steps_are_compared_leads_run_on_where_nothing_is_changed() -> None:
    """A lead that paused lost its gain for as long, and came and went with each comparison."""
    place = fabric.load("h100_node").communicator(range(8))
    kinds = ((Collective.all_gather, Phase.forward_gather), (Collective.reduce_scatter, Phase.gradient_scatter))
    calls = [Call(*kind, 1 << exponent) for exponent in (18, 20, 22, 24) for kind in kinds for _ in range(2)]
    n_led = n_rested = 0
    for seed in range(1, 5):
        if n_led and n_rested:
            break
        world = SeeminglyHidden("h100_node", place, calls, noise=0.05, seed=seed)
        world.compute_us = 2.3 * sum(world.truth(call, BASELINE)[0] for call in calls)
        brain = make_brain(world)
        for _ in range(200):
            comparing = brain.variant
            plans = play(world, brain, 1)
            if not plans or comparing is None or brain.variant != comparing:
                continue
            assert brain.plan is not None
            for view in brain.keys:
                if view.provisional is None:
                    continue
                if view.key not in comparing.settings:
                    assert brain.plan.settings[view.key] in (view.provisional, view.trial)
                    n_led += 1
                elif not brain.plan.has_variant:
                    assert brain.plan.settings[view.key] == view.incumbent
                    n_rested += 1
    assert n_led
    assert n_rested


def test_a_trial_does_not_outlive_its_daemon():
    """With nobody to watch it, a trial gives way by itself before long; what is settled stays."""
    world = _world()
    brain = make_brain(world)
    n_plans = {True: 0, False: 0}
    for _ in range(400):
        for plan in play(world, brain, 1):
            assert brain.plan is not None
            has_trial = brain.plan.has_variant or bool(brain.plan.explores)
            n_plans[has_trial] += 1
            assert has_trial == (bool(plan.then) and plan.then[-1].n_steps >= LEAST_TRIAL_STEPS)
    assert all(n_plans.values())


def test_a_trial_whose_plan_gave_way_by_itself_is_asked_for_again():
    world = _world()
    brain = make_brain(world)
    while not (world.plan.then and brain.plan is not None and brain.plan.explores):
        play(world, brain, 1)
        assert world.step < 200
    last = world.plan.at_last()
    world.plan, world.adopted_at = last, world.step  # nobody renewed it
    brain.adopted(last.epoch, world.step)
    plans = play(world, brain, 3)
    assert plans
    assert plans[0].epoch > last.epoch
    n_tried = 0
    for _ in range(10):
        play(world, brain, 1)
        n_tried += brain.plan is not None and bool(brain.plan.explores)
    assert n_tried


@pytest.mark.parametrize("seed", [0, 1])
def test_a_promoted_setting_outlives_its_daemon(seed):
    """With nothing else to be changed, the plan it won under would run on, which lasts no longer than a trial."""
    world = World(
        "ethernet_boxes",
        fabric.load("ethernet_boxes").communicator(range(16)),
        [Call(Collective.all_gather, Phase.forward_gather, 1 << 17)] * 2,
        seed=seed,
        compute_us=100_000.0,
    )
    brain = make_brain(world)
    n_promoted = 0
    for _ in range(120):
        play(world, brain, 1)
        n_promoted += sum(decision.kind == "promote" for decision in brain.decisions())
        tries = any(one.trial is not None or one.provisional is not None for one in brain.keys)
        if n_promoted and not tries and brain.plan is not None and not brain.plan.has_variant:
            assert world.plan.rows
            assert not world.plan.then
    assert n_promoted


def test_a_plan_that_the_ranks_gave_up_is_offered_again():
    """A daemon that was silent for a while lives on: the ranks went back to NCCL's own choice without it."""
    world = _world()
    brain = make_brain(world)
    play(world, brain, 150)
    before = world.plan
    assert before.rows
    world.plan = Plan(0)
    brain.adopted(0, world.step)
    again, *_ = play(world, brain, 5)
    assert again.epoch > before.epoch
    assert again.rows == before.rows


def test_a_plan_that_nobody_adopts_is_offered_again() -> None:
    """Refused, or lost on its way: else what is on trial would run until the job ends."""
    world = _world()
    brain = make_brain(world)
    plans = play(world, brain, 20)
    assert any(plan.rows for plan in plans)
    in_force = world.plan
    ignored, at_step = [], []
    while world.step < 600:
        block, record = world.run_step()
        brain.observe(block)
        brain.step_finished(record)
        plan = brain.propose()
        if plan is not None and plan.epoch > in_force.epoch:
            ignored.append(plan)
            at_step.append(world.step)
    assert len(ignored) >= 5
    assert at_step[-1] >= 600 - HORIZON_STEPS
    assert all(later - before <= HORIZON_STEPS for before, later in itertools.pairwise(at_step))
    epochs = [plan.epoch for plan in ignored]
    assert epochs == sorted(set(epochs))
