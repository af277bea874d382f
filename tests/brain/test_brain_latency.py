"""Short steps: hundreds of them pass before anything is known of a trial, and more until it is withdrawn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Candidate, Collective, Phase, Plan, StepRecord
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.explaining.words import comparison

CALL = Call(Collective.all_reduce, Phase.other, 1 << 20)


class ShortSteps(World):
    """One call per step and next to no computation; a whole report's steps at a time."""

    surprise = 0.0
    """Settings other than NCCL's own choice take this many times its time, whatever is predicted of them; 0: not so."""

    def truth(self, call: Call, candidate: Candidate) -> tuple[float, Candidate]:
        us, ran = super().truth(call, candidate)
        if self.surprise and not candidate.is_baseline:
            us = self.surprise * super().truth(call, BASELINE)[0]
        return us, ran

    def run_steps(self, n_steps: int) -> tuple[np.ndarray, list[StepRecord]]:
        us, ran = self.truth(CALL, self.chosen(CALL))
        block = np.zeros(n_steps, MEASUREMENT)
        times_us = us * np.exp(self.rng.normal(0.0, self.noise, n_steps))
        block["n_ranks"], block["n_nodes"] = self.communicator.n_ranks, self.communicator.n_nodes
        block["message_bytes"], block["duration_us"] = CALL.message_bytes, times_us
        block["collective"], block["phase"] = CALL.collective, CALL.phase
        block["algorithm"], block["protocol"], block["n_channels"] = ran.algorithm, ran.protocol, ran.n_channels
        block["is_default"] = self.chosen(CALL).is_baseline
        block["epoch"], block["step"] = self.plan.epoch, self.step + np.arange(n_steps)
        records = [
            StepRecord(self.step + at, self.plan.epoch, self.compute_us + float(time_us), float(time_us), 0.3)
            for at, time_us in enumerate(times_us)
        ]
        self.step += n_steps
        return block, records


def _world(seed: int) -> ShortSteps:
    machine = fabric.load("ethernet_boxes")
    place = machine.communicator(range(min(16, machine.max_ranks)))
    world = ShortSteps("ethernet_boxes", place, [CALL], compute_us=60.0, seed=seed)
    world.step, world.plan = 20_000, Plan(13)
    return world


def _play(
    world: ShortSteps, brain: Brain, n_reports: int, report_steps: int, *, ends_looks: bool = True
) -> list[float]:
    """Percent of training time spent, after each report; plans are adopted half a report after they were made."""
    if not brain.budget.n_steps:
        brain.adopted(world.plan.epoch, world.step)
    spent = []
    for _ in range(n_reports):
        blocks, records = [], []
        for at in range(report_steps):
            is_due = at == report_steps // 2 and bool(world.on_its_way)
            if is_due or ends_looks:
                world.follow(world.on_its_way.pop()[1] if is_due else None, brain)
            block, of_step = world.run_steps(1)
            blocks.append(block)
            records += of_step
        brain.observe(np.concatenate(blocks))
        for record in records:
            brain.step_finished(record)
        if (plan := brain.propose()) is not None:
            world.on_its_way.append((world.step, plan))
        spent.append(brain.spent_percent)
    return spent


@pytest.mark.parametrize("ends_looks", [True, False])
def test_a_surprise_costs_a_few_steps_however_late_reports_are(ends_looks: bool) -> None:
    """Eight times as slow as NCCL's choice, whatever was predicted, in a key that is 97 % of the step."""
    world = _world(seed=0)
    world.surprise = 8.0
    brain = make_brain(world)
    most_overdrawn_steps = 0.0
    for _ in range(80):
        _play(world, brain, 5, 8, ends_looks=ends_looks)
        step_us = brain.budget.training_us / brain.budget.n_steps
        most_overdrawn_steps = max(most_overdrawn_steps, -brain.budget.remaining_us / step_us)
    tried = [decision.candidate for decision in brain.decisions() if decision.kind == "explore"]
    assert tried, "the budget that is earned must be put to use"
    assert len(tried) == len(set(tried)), "it is not tried again"
    # A first look of two steps, seven steps' time more each. Where looks do not end by themselves, one has to show it.
    assert most_overdrawn_steps <= (20.0 if ends_looks else 200.0)
    assert brain.spent_percent <= 1.0 + 100.0 * most_overdrawn_steps / brain.budget.n_steps


def test_more_time_is_said_as_more_time() -> None:
    assert comparison(math.log(406.2 / 782.6)) == "92.7 % slower"
    assert comparison(math.log(782.6 / 406.2)) == "48.1 % faster"
