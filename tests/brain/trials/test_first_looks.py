"""Where reports and plans are long on their way, what was never measured gives way by itself after two steps."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, World, gain_share, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Candidate, Collective, Phase, Plan
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.policy.risk import FIRST_LOOK_STEPS

LATENCY_STEPS = 8


def _ddp(seed: int = 9) -> World:
    """Thirty buckets of one size are nearly all of the step."""
    place = fabric.load("ethernet_boxes").communicator(range(16))
    calls = [Call(Collective.all_reduce, Phase.other, 700_000)] * 30
    return World("ethernet_boxes", place, calls, noise=0.05, compute_us=4_000.0, seed=seed)


def _zero3(seed: int = 1) -> World:
    place = fabric.load("ethernet_boxes").communicator(range(16))
    calls = [
        Call(collective, phase, nbytes)
        for nbytes in (1 << 14, 1 << 17, 1 << 20)
        for collective, phase in (
            (Collective.all_gather, Phase.forward_gather),
            (Collective.all_gather, Phase.backward_gather),
            (Collective.reduce_scatter, Phase.gradient_scatter),
        )
    ]
    return World("ethernet_boxes", place, calls, compute_us=30_000.0, seed=seed)


def _is_look(plan: Plan) -> bool:
    return bool(plan.then) and plan.then[0].n_steps == FIRST_LOOK_STEPS


def _asked(plan: Plan, world: World, call: Call) -> Candidate:
    place = world.communicator, call.collective, call.phase
    return next((row.candidate for row in plan.rows if row.holds_for(*place, call.message_bytes)), BASELINE)


def _step(world: World, brain: Brain) -> Plan | None:
    """One step as `play` has it, plans that many steps on their way."""
    block, record = world.run_step()
    brain.observe(block)
    brain.step_finished(record)
    plan = brain.propose()
    if plan is not None:
        world.on_its_way.append((world.step + LATENCY_STEPS, plan))
    is_due = bool(world.on_its_way) and world.on_its_way[0][0] <= world.step
    world.follow(world.on_its_way.pop(0)[1] if is_due else None, brain)
    return plan


@pytest.mark.parametrize("seed", [9, 10])
def test_a_key_that_fills_steps_is_tuned_although_plans_are_long_on_their_way(seed: int) -> None:
    world = _ddp(seed)
    brain = make_brain(world)
    for _ in range(300):
        _step(world, brain)
    ((own_us, best_us, chosen_us),) = gain_share(world, brain).values()
    assert best_us < 0.7 * own_us
    assert chosen_us <= 1.02 * best_us
    assert brain.spent_percent <= 1.0


def test_the_plan_after_a_first_look_has_the_best_known_settings() -> None:
    world = _zero3()
    brain = make_brain(world)
    n_looks = 0
    for _ in range(400):
        plan = _step(world, brain)
        if plan is None or not _is_look(plan):
            continue
        n_looks += 1
        after = brain.plan
        assert after is not None
        assert plan.stages()[1][1] == after.plan
        looked_at = {
            (call.collective, call.phase)
            for call in world.calls
            if _asked(plan, world, call) != _asked(after.plan, world, call)
        }
        ran = {
            (state.key.collective, state.key.phase)
            for state in brain.keys
            if state.trial is not None and after.settings[state.key] == state.usual
        }
        assert looked_at
        assert looked_at <= ran
    assert n_looks >= 5
    found = gain_share(world, brain)
    attainable = sum(own - best for own, best, _ in found.values())
    assert sum(own - chosen for own, _, chosen in found.values()) >= 0.9 * attainable


def test_settings_that_were_never_measured_run_two_steps_only() -> None:
    world = _zero3()
    brain = make_brain(world)
    measured: set[tuple[Call, Candidate]] = {(call, BASELINE) for call in world.calls}
    looking_since: int | None = None
    n_looks = 0
    for _ in range(200):
        _step(world, brain)
        if brain.plan is not None and brain.plan.has_variant:
            break
        running = {(call, world.chosen(call)) for call in world.calls}
        if not _is_look(world.plan):
            looking_since = None
            assert running <= measured
        elif looking_since is None:
            looking_since = world.step
            n_looks += 1
            measured |= running
        else:
            assert world.step - looking_since < FIRST_LOOK_STEPS
    assert n_looks >= 5


def test_only_the_first_plan_ends_by_itself_if_plans_arrive_soon() -> None:
    """Before it nobody knows how long plans are on their way."""
    world = _zero3()
    brain = make_brain(world)
    plans = play(world, brain, 100)
    assert _is_look(plans[0])
    assert len(plans) > 5
    assert not any(map(_is_look, plans[1:]))


def _steps_until_a_try_is_measured(seed: int, told_share: float) -> int:
    """Where only this share of calls is told of: NCCL's thread comes too late for the others."""
    world, rng = _zero3(seed), np.random.default_rng(seed)
    brain = make_brain(world)
    for step in range(1_000):
        block, record = world.run_step()
        told = block[rng.random(len(block)) < told_share]
        if not told["is_default"].all():
            return step
        if len(told):
            brain.observe(told)
        brain.step_finished(record)
        plan = brain.propose()
        if plan is not None:
            world.on_its_way.append((world.step + LATENCY_STEPS, plan))
        is_due = bool(world.on_its_way) and world.on_its_way[0][0] <= world.step
        world.follow(world.on_its_way.pop(0)[1] if is_due else None, brain)
    return 1_000


def test_a_first_look_lasts_until_a_call_is_probably_measured() -> None:
    steps = [_steps_until_a_try_is_measured(seed, 0.02) for seed in range(8)]
    assert sum(steps) / len(steps) < 100, "two steps would be looked at in vain, again and again: 140 steps"


class Surprising(World):
    """Whatever is predicted, everything but NCCL's own choice takes eight times as long."""

    def truth(self, call: Call, candidate: Candidate) -> tuple[float, Candidate]:
        us, ran = super().truth(call, candidate)
        return (us if candidate.is_baseline else 8.0 * super().truth(call, BASELINE)[0]), ran


@pytest.mark.parametrize("latency_steps", [5, 50])
def test_late_plans_lose_a_few_steps_at_most_and_are_charged(latency_steps: int) -> None:
    """Variants of the whole plan included, which would run what was never measured until the next plan comes."""
    place = fabric.load("ethernet_boxes").communicator(range(2))
    call = Call(Collective.all_gather, Phase.forward_gather, 132_352)
    world = Surprising("ethernet_boxes", place, [call] * 3, compute_us=150.0, seed=1)
    brain = make_brain(world)
    lost_us = 0.0
    for _ in range(600):
        lost_us += 3 * (world.truth(call, world.chosen(call))[0] - world.truth(call, BASELINE)[0])
        play(world, brain, 1, latency_steps=latency_steps)
    step_us = brain.budget.training_us / brain.budget.n_steps
    assert 0.0 < lost_us <= 20.0 * step_us
    assert brain.budget.spent_us >= 0.85 * lost_us
