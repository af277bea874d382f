"""Changes of the network: seen soon, rarely imagined, remembered when they come back."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, Unsteady, World, gain_share, make_brain, play, zero3_step
from benchmarks.policy.brain_safety import zero_calls
from zerotune.agent.nccl import fabric
from zerotune.store.records import Candidate, Collective, DecisionKey, Phase
from zerotune.tuner.learning.policy.change_detection import ChangeDetector, FinishedSteps


def test_at_most_one_false_alarm_in_a_hundred_thousand_calls() -> None:
    detector = ChangeDetector()
    rng = np.random.default_rng(5)
    n_alarms = 0
    for _ in range(400):
        keys, residuals = rng.integers(0, 5, 1000), rng.standard_normal(1000)
        fired = detector.update(FinishedSteps(keys, residuals, residuals))
        if len(fired):
            n_alarms += 1
            detector.reset()
    assert n_alarms <= 4


@pytest.mark.parametrize("shift", [1.2, -1.2, 3.0])
def test_a_shift_of_about_one_noise_scale_is_seen_within_fifty_calls(shift: float) -> None:
    delays, shifts = [], []
    for seed in range(50):
        rng = np.random.default_rng(seed)
        detector = ChangeDetector()
        for _ in range(50):
            feed(detector, rng.standard_normal(4))
        detector.reset()
        n_calls = 0
        while not len(feed(detector, rng.standard_normal(2) + shift)):
            n_calls += 2
        delays.append(n_calls)
        shifts.append(detector.shift(np.zeros(1, np.int64)))
    assert np.median(delays) <= 50
    assert np.median(shifts) == pytest.approx(shift, rel=0.4)


def feed(detector: ChangeDetector, residuals: np.ndarray) -> np.ndarray:
    return detector.update(FinishedSteps(np.zeros(len(residuals), np.int64), residuals, residuals))


@pytest.mark.parametrize(("factor", "regime"), [(1.025, 0), (1 / 1.025, 0), (1.08, 1)])
def test_drift_is_followed_and_not_called_a_change(factor: float, regime: int) -> None:
    world = _world()
    world.noise = world.step_noise = 0.005
    brain = make_brain(world)
    play(world, brain, 60)
    world.slowdown = {"all_gather": factor, "reduce_scatter": factor}
    play(world, brain, 40)
    assert brain.regime == regime


@pytest.mark.parametrize(("place", "n_ranks"), [("h100_node", 8), ("ethernet_boxes", 16)])
def test_a_small_change_is_noticed_in_the_middle_of_trials(place: str, n_ranks: int) -> None:
    """What leads or is on trial has taken a known time, too, and all keys together say more than each."""
    calls = [
        Call(kind, phase, 1 << exponent)
        for exponent in (18, 21, 24)
        for kind, phase in (
            (Collective.all_gather, Phase.forward_gather),
            (Collective.reduce_scatter, Phase.gradient_scatter),
        )
    ] * 2
    n_noticed = 0
    for seed in range(4):
        world = World(
            place, fabric.load(place).communicator(range(n_ranks)), calls, seed=seed, noise=0.03, step_noise=0.01
        )
        brain = make_brain(world)
        play(world, brain, 60)
        assert brain.regime == 0
        world.slowdown = {"all_gather": 1.05, "reduce_scatter": 1.05}
        play(world, brain, 25)
        n_noticed += brain.regime != 0
    assert n_noticed >= 3


@pytest.mark.parametrize("kind", ["slow_steps", "weather", "drift"])
def test_calls_of_a_step_that_suffer_together_are_no_change_of_regime(kind: str) -> None:
    place = fabric.load("h100_node").communicator(range(8))
    calls = [
        Call(kind, phase, 1 << exponent)
        for exponent in (18, 21)
        for kind, phase in (
            (Collective.all_gather, Phase.forward_gather),
            (Collective.reduce_scatter, Phase.gradient_scatter),
        )
        for _ in range(6)
    ]
    n_changes = 0
    for seed in range(2):
        world = Unsteady("h100_node", place, calls, seed=seed, noise=0.03, step_noise=0.01, kind=kind)
        brain = make_brain(world)
        play(world, brain, 150)
        n_changes += brain.n_regimes - 1
    assert n_changes <= 4, "calls that grow for ever are a change now and then; taken one by one they were fifteen"


def _world(seed: int = 0) -> World:
    machine = fabric.load("ethernet_boxes")
    calls = [
        Call(kind, phase, 1 << exponent)
        for exponent in (17, 20, 23)
        for kind, phase in (
            (Collective.all_gather, Phase.forward_gather),
            (Collective.reduce_scatter, Phase.gradient_scatter),
        )
    ] * 2
    return World("ethernet_boxes", machine.communicator(range(16)), calls, compute_us=100_000.0, seed=seed)


def test_congestion_is_noticed_and_the_old_regime_recognised_when_it_ends() -> None:
    world = _world()
    brain = make_brain(world)
    play(world, brain, 80)
    assert brain.regime == 0
    before = [state.incumbent for state in brain.keys]
    world.slowdown = {"all_gather": 1.6, "reduce_scatter": 1.6}
    play(world, brain, 8)
    assert brain.regime == 1
    play(world, brain, 40)
    world.slowdown = {}
    play(world, brain, 12)
    assert brain.regime == 0, "the first regime was not recognised"
    assert [state.incumbent for state in brain.keys] == before


@pytest.mark.slow
def test_one_step_does_not_bring_an_old_regime_back() -> None:
    """Calls of one step share what it suffers: a change by 5 % that was noticed stays noticed."""
    n_back = 0
    for seed in range(20):
        place, calls = fabric.load("h100_node").communicator(range(8)), zero_calls((18, 21, 24))
        world = World("h100_node", place, calls, seed=seed, noise=0.03, step_noise=0.01)
        brain = make_brain(world)
        play(world, brain, 60)
        world.slowdown = {Collective.all_gather.name: 1.05, Collective.reduce_scatter.name: 1.05}
        play(world, brain, 40)
        n_back += brain.regime == 0
    assert n_back == 0


def test_leads_go_on_when_the_network_changes() -> None:
    """A change that was none, too, would else cost all leads and the steps until they may be tried again."""
    place = fabric.load("h100_ib_2").communicator(range(16))
    calls = [Call(Collective.all_gather, Phase.forward_gather, 1 << exponent) for exponent in range(15, 25)]
    world = World("h100_ib_2", place, calls, seed=3, noise=0.05)
    brain = make_brain(world)
    play(world, brain, 60)

    def provisionals() -> dict[DecisionKey, Candidate]:
        return {one.key: one.provisional for one in brain.keys if one.provisional is not None}

    while len(provisionals()) < 2:
        assert world.step < 150
        play(world, brain, 1)
    for slowdown, regime in (({"all_gather": 1.6}, 1), ({}, 0)):
        world.slowdown = slowdown
        while brain.regime != regime:
            assert world.step < 250
            led = provisionals()
            play(world, brain, 1)
        proven = {one.key: one.incumbent for one in brain.keys}
        assert provisionals().items() >= {(key, one) for key, one in led.items() if proven[key] != one}
        play(world, brain, 20)


def test_a_job_that_has_known_many_networks_goes_on() -> None:
    """The oldest regime is forgotten first: the first network is a new one when it comes back."""
    world = World("ethernet_boxes", fabric.load("ethernet_boxes").communicator(range(2)), zero3_step(n_ranks=2))
    brain = make_brain(world)
    play(world, brain, 20)
    n_networks = 10
    for at in [*range(1, n_networks), 0]:
        world.slowdown = dict.fromkeys(("all_gather", "reduce_scatter"), 1.5**at)
        n_known, until = brain.n_regimes, world.step + 60
        while brain.n_regimes == n_known:
            assert world.step < until, at
            play(world, brain, 1)
        play(world, brain, 20)
    assert brain.n_regimes == n_networks + 1


def test_gains_are_found_while_the_network_drifts() -> None:
    """Times grow by 0.05 % with each step: what was measured long ago would take longer by now."""
    node = fabric.load("h100_node").communicator(range(8))
    calls = [Call(kind, Phase.other, 1 << 20) for kind in (Collective.all_gather, Collective.reduce_scatter)] * 2
    world = Unsteady("h100_node", node, calls, flat=True, kind="drift")
    brain = make_brain(world)
    play(world, brain, 600)
    assert not any(one.kind == "promote" for one in brain.decisions())
    boxes = fabric.load("ethernet_boxes").communicator(range(16))
    world = Unsteady("ethernet_boxes", boxes, calls, kind="drift", compute_us=100_000.0)
    brain = make_brain(world)
    play(world, brain, 300)
    base_us, best_us, ours_us = map(sum, zip(*gain_share(world, brain).values(), strict=True))
    assert base_us - ours_us > 0.9 * (base_us - best_us) > 0.0


def test_a_coarse_clock_is_no_change() -> None:
    """Calls of 28 us on a clock of 10 us: one in six shows 20, the others 30; and a change is still noticed."""
    detector, rng = ChangeDetector(), np.random.default_rng(0)

    def step(unit: float, detector: ChangeDetector = detector) -> bool:
        units = np.array([unit])
        return bool(len(detector.update(FinishedSteps(np.zeros(1, np.int64), units, units))))

    n_false = 0
    for is_low in rng.random(10_000) < 1.0 / 6.0:
        if step(-2.24 if is_low else 0.45):
            n_false += 1
            detector.reset()
    assert not n_false
    assert any(step(-2.24) for _ in range(12))
    detector.reset()
    assert any(step(4.0) for _ in range(6))
