"""Short steps: hundreds of them pass before anything is known of a trial, and more until it is withdrawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from brain_world import Call, World, make_brain

from agent.nccl import fabric
from store.measurements import MEASUREMENT
from store.records import BASELINE, Candidate, Collective, Phase, Plan, StepRecord
from tuner.brain import Brain
from tuner.policy.withdrawal import Withdrawal
from tuner.policy.words import comparison

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


def _play(world: ShortSteps, brain: Brain, n_reports: int, report_steps: int) -> list[float]:
    """Percent of training time spent, after each report; plans are adopted half a report after they were made."""
    brain.adopted(world.plan.epoch, world.step)
    coming: Plan | None = None
    spent = []
    for _ in range(n_reports):
        first, of_first = world.run_steps(report_steps // 2)
        if coming is not None:
            world.plan, coming = coming, None
            brain.adopted(world.plan.epoch, world.step)
        second, of_second = world.run_steps(report_steps // 2)
        brain.observe(np.concatenate([first, second]))
        for record in (*of_first, *of_second):
            brain.step_finished(record)
        coming = brain.propose()
        spent.append(brain.spent_percent)
    return spent


@pytest.mark.parametrize(("surprise", "most_percent"), [(0.0, 0.1), (8.0, 1.0)])
def test_the_budget_counts_the_steps_until_a_trial_can_be_withdrawn(surprise: float, most_percent: float) -> None:
    world = _world(seed=0)
    world.surprise = surprise
    brain = make_brain(world)
    spent = _play(world, brain, 1200, 8)
    n_trials = sum(decision.kind == "explore" for decision in brain.decisions())
    assert n_trials, "the budget that is earned must be put to use"
    # What ten times the present duration would cost has been earned before it begins.
    assert max(spent) <= most_percent
    if surprise:
        assert n_trials == 1
    else:
        assert brain._states[0].incumbent == min(
            brain._costs.candidates(world.communicator, CALL.collective), key=lambda one: world.truth(CALL, one)[0]
        )


def test_the_delay_is_what_was_seen() -> None:
    delay = Withdrawal(3.0)
    assert delay.steps == 3.0
    delay.observed(1000, 1299)
    delay.looked()
    assert delay.steps == 900.0, "no plan was seen adopted: some reports' time is assumed"
    delay.offered(5)
    delay.observed(1300, 1599)
    delay.adopted(5, 1450)
    delay.looked()
    assert delay.steps == 300.0 + 151.0
    for at in range(100):
        delay.observed(1600 + at, 1600 + at)
        delay.looked()
        delay.offered(6 + at)
        delay.adopted(6 + at, 1601 + at)
    assert delay.steps == 3.0


def test_more_time_is_said_as_more_time() -> None:
    assert comparison(math.log(406.2 / 782.6)) == "92.7 % slower"
    assert comparison(math.log(782.6 / 406.2)) == "48.1 % faster"
