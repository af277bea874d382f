"""Where all settings take the same, luck promotes nothing, however often one looks."""

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
from zerotune.tuner.learning.policy.acquisition import PolicySettings, judge
from zerotune.tuner.learning.policy.keys import KeyState
from zerotune.tuner.learning.policy.observations import (
    DEPTH,
    NONE,
    CallEvidence,
    NoiseModel,
    SharedNoise,
    radius_of_pairs,
)

KEY = DecisionKey(CommunicatorClass(8, 1), int(Collective.all_gather), Phase.forward_gather, 20)
LUCKY, NEXT = (Candidate(Algorithm.ring, protocol, 4) for protocol in (Protocol.ll, Protocol.simple))
SIGMA = 0.1


def _measure(evidence: CallEvidence, candidate: Candidate, log_us: np.ndarray, at: int = 0) -> int:
    """One call in each step from `at` on; the step after them."""
    for step, value in enumerate(log_us, at):
        slot = np.array([evidence.slot(0, candidate)])
        evidence.add(evidence.calls(slot, np.array([value])), np.array([step]))
    return at + len(log_us)


def test_each_set_of_units_that_is_compared_anew_asks_for_more() -> None:
    """Where steps are alike, a key is compared by its newest units only: a job has many sets of them."""
    noise = NoiseModel()
    evidence = CallEvidence(noise)
    at = _measure(evidence, BASELINE, np.full(3, 5.0))
    slot = evidence.slot(0, BASELINE)
    assert evidence.n_th_window(slot) == 1
    noise.noise = SharedNoise(1.0, 0.8)
    assert evidence.n_th_window(slot) == 1
    at = _measure(evidence, BASELINE, np.full(2 * DEPTH, 5.0), at)
    assert evidence.n_th_window(slot) == 3
    _measure(evidence, NEXT, np.full(5, 5.0), at)
    state = KeyState(0, KEY, 1e6)
    state.trial, state.numbers = NEXT, {NEXT: 2}
    _, _, half = judge(evidence, state, PolicySettings(false_promotion=0.01))
    _, pairs, sigma = evidence.contrast(slot, evidence.slot(0, NEXT))
    assert half == radius_of_pairs(pairs, sigma, 0.01 / (2 * 3) / 3**2)
    noise.noise = NONE
    assert evidence.n_th_window(slot) == 1, "nothing is forgotten then"
