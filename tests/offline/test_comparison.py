"""A decided setting against NCCL's own choice: measurements win, predictions say that they are."""

from __future__ import annotations

import json

from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    CandidateStatistics,
    Collective,
    CommunicatorClass,
    Decision,
    DecisionKey,
    Phase,
    Protocol,
)
from zerotune.tuner.modeling.medians import medians
from zerotune.tuner.offline.comparison import compare
from zerotune.tuner.offline.plots import Winner

KEY = DecisionKey(CommunicatorClass(2, 1), Collective.all_gather, Phase.other, 80)
FAST = Candidate(Algorithm.ring, Protocol.ll, 2)
OWN = Candidate(Algorithm.ring, Protocol.simple, 8)


def line(candidate: Candidate, count: int, median_us: float) -> CandidateStatistics:
    return CandidateStatistics(KEY, candidate, candidate != FAST, count, median_us, median_us, 0.0, median_us, 0.0)


def decision(candidate: Candidate = FAST, alternatives: str = "[]") -> Decision:
    return Decision("j", "f", KEY, candidate, 1, "promote", "", 92.0, 80.0, 99.0, 100.0, alternatives=alternatives)


def test_measured_times_win_over_guesses_and_near_ones_first():
    here, everywhere = medians([line(OWN, 9, 200.0), line(FAST, 9, 162.0)]), medians([line(OWN, 9, 1.0)])
    found = compare(decision(), here, everywhere)
    assert (found.own, found.is_measured, str(found)) == (OWN, True, "19 % faster")
    # The job never ran NCCL's own choice: other jobs did.
    found = compare(decision(), medians([line(FAST, 9, 50.0)]), here)
    assert (found.is_measured, str(found)) == (True, "19 % faster")
    seen = json.dumps([{"candidate": str(FAST), "measured_us": 81.0}])
    assert str(compare(decision(alternatives=seen), {}, {})) == "19 % faster"


def test_predictions_say_so():
    found = compare(decision(), {}, {})
    assert str(found) == "8 % faster predicted"
    assert "predicted" in Winner("ring/ll", found.change_percent, found.is_measured).words(is_narrow=False)
    assert Winner("ring/ll", -1.0, is_measured=True).rank < Winner("ring/simple", -50.0, is_measured=False).rank
    assert str(compare(decision(BASELINE), {}, {})) == "as fast"
