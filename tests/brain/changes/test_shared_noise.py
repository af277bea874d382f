"""Noise that neighbouring steps share promotes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.simulated.brain_world import Call, Unsteady, make_brain, play, zero3_step
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, CommunicatorClass, Phase, Protocol
from zerotune.tuner.learning.policy.observations import DEPTH, CallEvidence, UnitHistory

NODE = CommunicatorClass(8, 1)


def _evidence(values: np.ndarray, runs: np.ndarray) -> CallEvidence:
    """What each step measured at a key, and whether the candidate ran in it; slot 0 is NCCL's own choice."""
    evidence = CallEvidence()
    slots = np.array([evidence.slot(0, BASELINE), evidence.slot(0, Candidate(Algorithm.ring, Protocol.ll, 4))])
    for step, (value, at) in enumerate(zip(values, runs, strict=True)):
        evidence.add(evidence.calls(slots[[at]], np.array([value])), np.array([step]))
    return evidence


def _load(rng: np.random.Generator, n: int, reach: float, sigma: float) -> np.ndarray:
    """A load of the network that fades from step to step."""
    load, loads = rng.normal(0.0, sigma), []
    for _ in range(n):
        load = reach * load + math.sqrt(1.0 - reach**2) * rng.normal(0.0, sigma)
        loads.append(load)
    return np.array(loads)


def test_neighbours_tell_a_gain_from_what_the_network_did() -> None:
    """Of a gain of 5 %, beside a load of 5 % that fades within twenty steps; the trial takes turns at the end."""
    runs = np.where(np.arange(40) >= 20, np.arange(40) % 2, 0)
    errors, of_means = [], []
    for seed in range(30):
        values = _load(np.random.default_rng(seed), 40, 0.95, 0.05) - 0.05 * runs
        evidence = _evidence(values, runs)
        errors.append(evidence.nearby(0, 1).gain - 0.05)
        of_means.append(evidence.contrast(0, 1).gain - 0.05)
    assert np.std(errors) < 0.6 * np.std(of_means)
    assert abs(float(np.mean(errors))) < 0.01


def test_a_network_that_changes_when_a_trial_begins_is_no_gain() -> None:
    """Steps from the 20th on take 5 % less; the trial runs then, the incumbent at first only before, then beside it."""
    rng = np.random.default_rng(3)
    values = rng.normal(0.0, 0.01, 30) - 0.05 * (np.arange(30) >= 20)
    runs = np.array([0] * 20 + [1] * 10)
    evidence = _evidence(values, runs)
    assert evidence.contrast(0, 1).gain > 0.04
    assert not evidence.nearby(0, 1).pairs, "the incumbent has not run since"
    runs[[22, 25, 28]] = 0
    assert _evidence(values, runs).nearby(0, 1).gain < 0.025
    steady = np.where(runs == 1, -0.05, 0.0) + rng.normal(0.0, 0.01, 30)
    assert _evidence(steady, runs).nearby(0, 1).gain > 0.025


def test_of_what_was_not_measured_nothing_is_known() -> None:
    evidence = _evidence(np.zeros(5), np.zeros(5, np.int64))
    assert not evidence.nearby(0, 1).pairs
    assert not len(evidence.history.of(99)[0])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=200))
def test_the_newest_units_of_every_key_are_kept_in_order(units: list[tuple[int, int]]) -> None:
    history, expected = UnitHistory(), {key: [] for key in range(4)}
    for at, (key, slot) in enumerate(units):
        history.add(np.array([key]), np.array([slot]), np.array([float(at)]))
        expected[key].append((slot, float(at)))
    for key, added in expected.items():
        slots, values = history.of(key)
        assert [*zip(slots.tolist(), values.tolist(), strict=True)] == added[-DEPTH:]


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
def test_what_is_measured_as_bursts_begin_and_end_promotes_hardly_anything() -> None:
    """One change of the network does not make it restless yet, but proofs rest on neighbouring steps after it."""
    kinds = (
        (Collective.all_gather, Phase.forward_gather),
        (Collective.reduce_scatter, Phase.gradient_scatter),
    )
    calls = [Call(*kind, 1 << exponent) for exponent in (18, 21, 24) for kind in kinds for _ in range(2)]
    n_changes = n_promoted = 0
    for seed in range(503, 511):
        world = Unsteady("h100_node", NODE, calls, seed=seed, flat=True, kind="bursts")
        brain = make_brain(world)
        play(world, brain, 320)
        n_changes += brain.n_regimes - 1
        n_promoted += sum(one.kind == "promote" for one in brain.decisions())
    assert n_changes >= 6
    assert n_promoted <= 3, "of 48 keys, all settings alike"
