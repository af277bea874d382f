"""Where all settings take the same, luck promotes nothing: neither what is taken for drift, nor many looks."""

from __future__ import annotations

import numpy as np

from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Protocol,
)
from zerotune.tuner.learning.policy.evidence.evidence import Evidence, radius_of_pairs
from zerotune.tuner.learning.policy.evidence.serial_noise import DEPTH, NONE, NoiseModel, SharedNoise
from zerotune.tuner.learning.policy.trials.trial import KeyState, Verdict, compare, judge_lead, level

KEY = DecisionKey(CommunicatorClass(8, 1), int(Collective.all_gather), Phase.forward_gather, 20)
LUCKY, NEXT = (Candidate(Algorithm.ring, protocol, 4) for protocol in (Protocol.ll, Protocol.simple))
SIGMA = 0.1


def _measure(evidence: Evidence, candidate: Candidate, log_us: np.ndarray, at: int = 0) -> int:
    """One call in each step from `at` on; the step after them."""
    for step, value in enumerate(log_us, at):
        slot = np.array([evidence.slot(0, candidate)])
        evidence.add(evidence.calls(slot, np.array([value])), np.array([step]))
    return at + len(log_us)


def test_luck_that_ends_is_no_drift_that_speaks_for_what_is_measured_after_it() -> None:
    """Of many settings one seems to be faster, leads and falls back to what it takes."""
    n_seem = 0
    for seed in range(20):
        rng, evidence = np.random.default_rng(seed), Evidence()
        state = KeyState(0, KEY, float(1 << 20))
        state.lead = NEXT
        at = _measure(evidence, BASELINE, rng.normal(5.0, SIGMA, 120))
        at = _measure(evidence, LUCKY, rng.normal(5.0 - SIGMA, SIGMA, 70), at)
        at = _measure(evidence, LUCKY, rng.normal(5.0, SIGMA, 150), at)
        for _ in range(25):
            at = _measure(evidence, NEXT, rng.normal(5.0, SIGMA, 3), at)
            at = _measure(evidence, BASELINE, rng.normal(5.0, SIGMA, 1), at)
            gain, half = compare(evidence, evidence.slot(0, BASELINE), evidence.slot(0, NEXT), level(0.01, 1))
            n_seem += gain > half
            assert judge_lead(evidence, state, false_promotion=0.01, min_gain=0.005)[0] is not Verdict.better
    assert n_seem > 20, "by what is left without the drift it is faster"


def test_what_a_drift_slows_down_is_still_found_to_be_faster() -> None:
    rng, evidence = np.random.default_rng(1), Evidence()
    for step in range(400):
        runs = NEXT if step > 100 and step % 4 else BASELINE
        value = 5.0 - 0.05 * (runs == NEXT) + 0.0003 * step + rng.normal(0.0, 0.02)
        _measure(evidence, runs, np.array([value]), step)
    state = KeyState(0, KEY, float(1 << 20))
    state.lead = NEXT
    verdict, _, _ = judge_lead(evidence, state, false_promotion=0.01, min_gain=0.005)
    assert verdict is Verdict.better


def test_each_set_of_units_that_is_compared_anew_asks_for_more() -> None:
    """Where steps are alike, a key is compared by its newest units only: a job has many sets of them."""
    noise = NoiseModel()
    evidence = Evidence(noise)
    at = _measure(evidence, BASELINE, np.full(3, 5.0))
    slot = evidence.slot(0, BASELINE)
    assert evidence.n_th_window(slot) == 1
    noise.noise = SharedNoise(1.0, 0.8)
    assert evidence.n_th_window(slot) == 1
    at = _measure(evidence, BASELINE, np.full(2 * DEPTH, 5.0), at)
    assert evidence.n_th_window(slot) == 3
    _measure(evidence, NEXT, np.full(5, 5.0), at)
    _, half = compare(evidence, slot, evidence.slot(0, NEXT), 0.01)
    _, pairs, sigma = evidence.contrast(slot, evidence.slot(0, NEXT))
    assert half == radius_of_pairs(pairs, sigma, 0.01 / 3**2)
    noise.noise = NONE
    assert evidence.n_th_window(slot) == 1, "nothing is forgotten then"
