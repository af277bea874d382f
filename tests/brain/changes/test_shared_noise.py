"""Noise that neighbouring steps share promotes nothing."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.lib.simulated.brain_world import Unsteady, make_brain, play, zero3_step
from zerotune.store.records import BASELINE, Algorithm, Candidate, CommunicatorClass, Protocol
from zerotune.tuner.learning.policy.observations import CallEvidence

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


def test_congestion_that_comes_and_goes_promotes_nothing() -> None:
    n_promoted = n_explored = 0
    for seed in range(2):
        world = Unsteady("h100_node", NODE, zero3_step(n_ranks=8), seed=seed, flat=True, kind="congestion")
        brain = make_brain(world)
        play(world, brain, 300)
        n_promoted += sum(one.kind == "promote" for one in brain.decisions())
        n_explored += brain.n_explored
    assert n_explored > 40
    assert n_promoted == 0
