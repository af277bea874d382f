"""NCCL's own choice runs for two steps now and then, and what is said of a gain rests on the steps around these."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import (
    ALONE,
    Call,
    World,
    decided,
    make_brain,
    play,
    secretly_slow_job,
    zero3_step,
)
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Decision, StepRecord
from zerotune.store.step_times import SideBySide
from zerotune.tuner.learning.brain import BrainSettings

CONTROLLED = BrainSettings(control_share=0.001)
NAME = "h100_ib_2"
PLACE = fabric.load(NAME).communicator(range(16))


@dataclass
class Kept(World):
    """Keeps its steps. From `busy_from` on its host is busy: all takes twice as long, and scatters."""

    busy_from: float = math.inf
    steps: list[StepRecord] = field(default_factory=list)

    def run_step(self) -> tuple[np.ndarray, StepRecord]:
        is_busy = self.step >= self.busy_from
        block, record = super().run_step()
        factor = 2.0 * math.exp(self.rng.normal(0.0, 0.05)) if is_busy else 1.0
        block["duration_us"] *= factor
        exposed_us = None if record.exposed_us is None else factor * record.exposed_us
        record = msgspec.structs.replace(record, duration_us=factor * record.duration_us, exposed_us=exposed_us)
        self.steps.append(record)
        return block, record



def _job(seed: int = 0, busy_from: float = math.inf) -> Kept:
    return Kept(NAME, PLACE, zero3_step(), seed=seed, compute_us=2000.0, busy_from=busy_from)


def _compared(steps: list[StepRecord], decisions: list[Decision]) -> SideBySide:
    controls, found = {one.epoch for one in decisions if one.is_control}, SideBySide()
    for step in steps:
        found.add(step, is_control=step.epoch in controls)
    return found


def _true_gain(world: World, settled: dict[Call, float]) -> float:
    own_us = world.compute_us + sum(world.truth(call, BASELINE)[0] for call in world.calls)
    return 1.0 - (world.compute_us + sum(settled[call] for call in world.calls)) / own_us


@pytest.mark.parametrize(("latency_steps", "within_steps"), [(1, 100), (5, 150)])
@pytest.mark.parametrize("seed", range(3))
def test_the_gain_is_known_soon_and_true_and_costs_next_to_nothing(
    seed: int, latency_steps: int, within_steps: int
) -> None:
    world = _job(seed)
    brain = make_brain(world, settings=CONTROLLED)
    plans = play(world, brain, 1500, latency_steps=latency_steps)
    decisions, runs = brain.decisions(), decided(brain)
    gain = _true_gain(world, {call: world.truth(call, runs(call))[0] for call in world.calls})
    saved = _compared(world.steps, decisions).saved()
    assert saved is not None
    assert gain > 0.01
    assert 0.0 < saved.low_share < gain < saved.high_share
    assert saved.is_beyond_noise
    controls = {one.epoch for one in decisions if one.is_control}
    assert controls == {epoch for plan in plans for epoch in plan.control_epochs}
    n_lost = sum(step.epoch in controls for step in world.steps)
    assert n_lost <= 2 * len(controls), "each ends by itself, whatever is on its way"
    assert n_lost * gain <= 1.05 * 0.001 * len(world.steps)
    first = min(one.step for one in decisions if one.kind == "promote" and one.step is not None)
    assert _compared([one for one in world.steps if one.step <= first + within_steps], decisions).saved() is not None


@pytest.mark.parametrize("seed", range(3))
def test_a_host_that_becomes_busy_is_no_loss(seed: int) -> None:
    world = _job(seed, busy_from=500)
    brain = make_brain(world, settings=CONTROLLED)
    play(world, brain, 1500)
    saved = _compared(world.steps, brain.decisions()).saved()
    assert saved is not None
    assert saved.high_share > 0.0, "no loss is claimed"
    assert np.median([one.duration_us for one in world.steps[-100:]]) > 1.8 * world.steps[10].duration_us


def test_the_guard_withdraws_what_slows_steps_down_as_ever() -> None:
    n_slow = []
    for settings in (BrainSettings(), CONTROLLED):
        jobs = [secretly_slow_job(ALONE, 0.1, seed) for seed in range(4)]
        for world in jobs:
            play(world, make_brain(world, settings=settings), 400)
        n_slow.append(sum(world.n_slow for world in jobs))
    assert n_slow[1] < 1.5 * n_slow[0]
