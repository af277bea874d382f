"""Where reports and plans are long on their way, what was never measured gives way by itself after two steps."""

from __future__ import annotations

import pytest

from benchmarks.lib.simulated.brain_world import Call, World, gain_share, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Candidate, Collective, Phase, Plan
from zerotune.tuner.learning.brain import Brain

LATENCY_STEPS = 8


def _ddp(seed: int = 9) -> World:
    """Thirty buckets of one size are nearly all of the step."""
    place = fabric.load("ethernet_boxes").communicator(range(16))
    calls = [Call(Collective.all_reduce, Phase.other, 700_000)] * 30
    return World("ethernet_boxes", place, calls, noise=0.05, compute_us=4_000.0, seed=seed)


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


class Surprising(World):
    """Whatever is predicted, everything but NCCL's own choice takes eight times as long."""

    def truth(self, call: Call, candidate: Candidate) -> tuple[float, Candidate]:
        us, ran = super().truth(call, candidate)
        return (us if candidate.is_baseline else 8.0 * super().truth(call, BASELINE)[0]), ran


@pytest.mark.parametrize("latency_steps", [5, 50])
def test_however_late_plans_are_what_is_lost_is_charged_and_is_no_more_than_a_few_steps(latency_steps: int) -> None:
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
