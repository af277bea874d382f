"""Noise that neighbouring steps share: what it is like is told, and it promotes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.brain_world import Call, Unsteady, make_brain, play, zero3_step
from zerotune.store.records import Collective, CommunicatorClass, Phase
from zerotune.tuner.learning.policy.observations import (
    DEPTH,
    NONE,
    UNKNOWN,
    NoiseModel,
    SharedNoise,
    UnitHistory,
)

NODE = CommunicatorClass(8, 1)


def _history(values: np.ndarray, slots: np.ndarray) -> UnitHistory:
    return _history_of([(values, slots)])


def _history_of(keys: list[tuple[np.ndarray, np.ndarray]]) -> UnitHistory:
    """What each step measured at each key, and of which slot."""
    history = UnitHistory()
    for key, (values, slots) in enumerate(keys):
        for step, (value, slot) in enumerate(zip(values, slots, strict=True)):
            history.add(np.array([key]), np.array([slot]), step, np.array([1]), np.array([value]))
    return history


def _load(rng: np.random.Generator, n: int, reach: float, sigma: float) -> np.ndarray:
    """A load of the network that fades from step to step."""
    load, loads = rng.normal(0.0, sigma), []
    for _ in range(n):
        load = reach * load + math.sqrt(1.0 - reach**2) * rng.normal(0.0, sigma)
        loads.append(load)
    return np.array(loads)


def _told(reach: float, sigma: float, seed: int, n_keys: int = 4) -> SharedNoise:
    rng = np.random.default_rng(seed)
    model = NoiseModel()
    history = _history_of(
        [
            (_load(rng, 40, reach, sigma) + rng.normal(0.0, 0.02, 40), rng.integers(0, 2, 40))
            for _ in range(n_keys)
        ]
    )
    for _ in range(n_keys):
        model.ask(history, range(n_keys))
    return model.noise


def test_noise_of_steps_alone_is_told_from_noise_that_they_share() -> None:
    assert sum(_told(0.0, 0.0, seed) != NONE for seed in range(20)) <= 1
    found = [_told(0.95, 0.05, seed) for seed in range(20)]
    assert NONE not in found
    assert np.median([one.reach for one in found]) >= 0.9


def test_without_shared_noise_it_is_the_difference_of_means() -> None:
    rng = np.random.default_rng(1)
    values, slots = rng.normal(0.0, 0.02, 30), rng.integers(0, 3, 30)
    found = NoiseModel().contrast(_history(values, slots), 0, 0, 2, NONE)
    n_first, n_second = int((slots == 0).sum()), int((slots == 2).sum())
    assert found.gain == pytest.approx(values[slots == 0].mean() - values[slots == 2].mean())
    assert found.pairs == pytest.approx(n_first * n_second / (n_first + n_second))


def test_what_ran_at_another_time_says_less_than_what_took_turns() -> None:
    model, noise = NoiseModel(), SharedNoise(10.0, 0.95)
    rng = np.random.default_rng(2)
    values = _load(rng, 40, 0.95, 0.05)
    apart = model.contrast(_history(values, np.repeat([0, 1], 20)), 0, 0, 1, noise)
    in_turn = model.contrast(_history(values, np.tile([0, 1], 20)), 0, 0, 1, noise)
    assert apart.pairs < 1.0
    assert in_turn.pairs > 5.0


def test_a_network_that_changes_when_a_trial_begins_is_no_gain() -> None:
    """Steps from the 20th on take 5 % less; the trial runs then, the incumbent at first only before, then beside it."""
    rng = np.random.default_rng(3)
    values = rng.normal(0.0, 0.01, 30) - 0.05 * (np.arange(30) >= 20)
    slots = np.array([0] * 20 + [1] * 10)
    history, model = _history(values, slots), NoiseModel()
    assert model.contrast(history, 0, 0, 1, NONE).gain > 0.04
    assert not model.agrees(history, 0, 0, 1, 0.05), "the incumbent has not run since"
    slots[[22, 25, 28]] = 0
    assert not model.agrees(_history(values, slots), 0, 0, 1, 0.05)
    steady = np.where(slots == 1, -0.05, 0.0) + rng.normal(0.0, 0.01, 30)
    assert model.agrees(_history(steady, slots), 0, 0, 1, 0.05)


def test_of_what_was_not_measured_nothing_is_known() -> None:
    model, noise = NoiseModel(), SharedNoise(1.0, 0.5)
    history = _history(np.zeros(5), np.zeros(5, np.int64))
    assert model.contrast(history, 0, 0, 7, noise) == UNKNOWN
    assert model.contrast(history, 99, 0, 1, noise) == UNKNOWN


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=200))
def test_the_newest_units_of_every_key_are_kept_in_order(reports: list[tuple[int, int, int]]) -> None:
    """(key, slot, calls) of one report each; the same key and slot again within a step go on with its unit."""
    history, expected = UnitHistory(), {key: [] for key in range(4)}
    for at, (key, slot, n_calls) in enumerate(reports):
        step = at // 3
        history.add(np.array([key]), np.array([slot]), step, np.array([n_calls]), np.array([float(at)]))
        units = expected[key]
        if units and units[-1][:2] == [step, slot]:
            before, n_before = units[-1][2:]
            units[-1][2:] = [(before * n_before + at * n_calls) / (n_before + n_calls), n_before + n_calls]
        else:
            units.append([step, slot, float(at), n_calls])
    for key, units in expected.items():
        found = history.of(key)
        newest = units[-DEPTH:]
        assert found.steps.tolist() == [one[0] for one in newest]
        assert found.slots.tolist() == [one[1] for one in newest]
        assert found.values == pytest.approx([one[2] for one in newest])


def test_congestion_that_comes_and_goes_promotes_nothing() -> None:
    n_promoted = n_explored = 0
    for seed in range(3):
        world = Unsteady("h100_node", NODE, zero3_step(n_ranks=8), seed=seed, flat=True, kind="congestion")
        brain = make_brain(world)
        play(world, brain, 300)
        n_promoted += sum(one.kind == "promote" for one in brain.decisions())
        n_explored += brain.n_explored
    assert n_explored > 60
    assert n_promoted == 0


@pytest.mark.slow
def test_what_is_measured_as_bursts_begin_and_end_promotes_nothing() -> None:
    """One change of the network does not make it restless yet, but proofs rest on neighbouring steps after it."""
    kinds = (
        (Collective.all_gather, Phase.forward_gather),
        (Collective.reduce_scatter, Phase.gradient_scatter),
    )
    calls = [Call(*kind, 1 << exponent) for exponent in (18, 21, 24) for kind in kinds for _ in range(2)]
    n_changes = n_promoted = 0
    for seed in range(503, 506):
        world = Unsteady("h100_node", NODE, calls, seed=seed, flat=True, kind="bursts")
        brain = make_brain(world)
        play(world, brain, 320)
        n_changes += brain.n_regimes - 1
        n_promoted += sum(one.kind == "promote" for one in brain.decisions())
    assert n_changes >= 3
    assert n_promoted == 0
