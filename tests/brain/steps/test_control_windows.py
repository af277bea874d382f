"""NCCL's own choice runs for two steps now and then, and what is said of a gain rests on the steps around these."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, OverlappedWorld, World, decided, make_brain, play, zero3_step
from benchmarks.lib.simulated.earlier_jobs import knowledge
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Collective, Decision, Phase, StepRecord
from zerotune.store.step_times import SideBySide
from zerotune.tuner.learning.brain import BrainSettings
from zerotune.tuner.learning.policy.control import ControlWindows

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


@pytest.mark.parametrize(("seed", "latency_steps", "within_steps"), [(0, 1, 100), (1, 5, 150)])
def test_the_gain_is_known_soon_and_true_and_costs_next_to_nothing(
    seed: int, latency_steps: int, within_steps: int
) -> None:
    world = _job(seed)
    brain = make_brain(world, settings=CONTROLLED)
    plans = play(world, brain, 700, latency_steps=latency_steps)
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


def test_short_steps_get_several_control_windows_in_one_plan() -> None:
    world = _job()
    brain = make_brain(world, settings=msgspec.structs.replace(CONTROLLED, compare_steps=200))
    plans = play(world, brain, 1200, latency_steps=60)
    decisions = brain.decisions()
    controls = {one.epoch for one in decisions if one.is_control}
    assert controls == {epoch for plan in plans for epoch in plan.control_epochs}
    assert max(len(plan.control_epochs) for plan in plans) > 4
    ran = sum(step.epoch in controls for step in world.steps)
    assert 2 * 20 <= ran <= 2 * len(controls), "as many as were asked for, and each ends by itself"
    saved = _compared(world.steps, decisions).saved()
    assert saved is not None
    assert saved.n_windows >= 16
    assert saved.is_beyond_noise


def test_control_windows_do_not_change_the_settings_found() -> None:
    settled = []
    for settings in (BrainSettings(), CONTROLLED):
        world = _job()
        brain = make_brain(world, settings=settings)
        play(world, brain, 400)
        settled.append({one.key: one.incumbent for one in brain.keys})
        assert {"rollback", "pace", "regime"}.isdisjoint(one.kind for one in brain.decisions())
    assert settled[0] == settled[1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_a_host_that_becomes_busy_is_no_loss(seed: int) -> None:
    world = _job(seed, busy_from=500)
    brain = make_brain(world, settings=CONTROLLED)
    play(world, brain, 1500)
    saved = _compared(world.steps, brain.decisions()).saved()
    assert saved is not None
    assert saved.high_share > 0.0, "no loss is claimed"
    assert np.median([one.duration_us for one in world.steps[-100:]]) > 1.8 * world.steps[10].duration_us


def test_control_windows_never_overlap_trials_of_variants() -> None:
    calls = zero3_step(n_layers=2)
    world = OverlappedWorld(NAME, PLACE, calls, seed=0, compute_us=30_000.0)
    brain = make_brain(world, settings=CONTROLLED)
    n_controls = n_variants = 0
    for _ in range(600):
        for plan in play(world, brain, 1):
            n_controls += len(plan.control_epochs)
            n_variants += brain.variant is not None
            assert not (plan.control_epochs and brain.variant is not None)
    assert n_controls > 4
    assert n_variants > 4


GATHER = Call(Collective.all_gather, Phase.forward_gather, 1 << 17)


@pytest.mark.parametrize(
    ("settings", "pressure", "has_some"),
    [
        (CONTROLLED, 0.3, True),
        (msgspec.structs.replace(CONTROLLED, explore=False), 0.3, True),
        (msgspec.structs.replace(CONTROLLED, shadow=True), 0.3, False),
        (BrainSettings(), 0.3, False),
        (CONTROLLED, 0.97, False),
    ],
    ids=["usual", "without exploration", "in shadow", "none wanted", "short of memory"],
)
def test_when_there_are_some(settings: BrainSettings, pressure: float, has_some: bool) -> None:
    place = fabric.load("ethernet_boxes").communicator(range(16))
    world = World("ethernet_boxes", place, [GATHER] * 4, compute_us=5000.0)
    options = make_brain(world).costs.candidates(place, GATHER.collective)
    best = min(options, key=lambda one: world.truth(GATHER, one)[0])
    brain = make_brain(world, knowledge(world, proven={(GATHER, best): 0.6}), settings)
    play(world, brain, 40)
    brain.decisions()
    world.memory_pressure = pressure
    plans = play(world, brain, 200)
    assert any(plan.control_epochs for plan in plans) == has_some
    assert any(one.is_control for one in brain.decisions()) == has_some
    assert settings.shadow or brain.keys[0].usual == best


def test_without_a_tuned_setting_there_are_no_control_windows() -> None:
    world = World(NAME, PLACE, zero3_step(), flat=True)
    brain = make_brain(world, settings=CONTROLLED)
    plans = play(world, brain, 300)
    assert all(one.usual.is_baseline for one in brain.keys)
    assert not any(plan.control_epochs for plan in plans)


def test_control_windows_wait_for_a_settled_plan_but_not_for_ever() -> None:
    windows, begun = ControlWindows(0.001), []
    for step in range(400):
        if windows.is_due(step) and windows.is_calm(step, min(step, 60)):
            windows.begun(step, 0.1)
            begun.append(step)
    assert min(begun) > 60, "until then something new was in force at every look"
    restless, first = ControlWindows(0.001), None
    for step in range(400):
        if first is None and restless.is_due(step) and restless.is_calm(step, step):
            first = step
    assert first is not None
    assert 40 < first < 100
