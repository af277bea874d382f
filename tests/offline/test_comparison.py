"""A decided setting against NCCL's own choice: measurements win, predictions say that they are."""

from __future__ import annotations

import json

import numpy as np
import pytest

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
    size_class,
)
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.tuner.modeling.medians import medians
from zerotune.tuner.offline.comparison import compare
from zerotune.tuner.offline.explanations import explain
from zerotune.tuner.offline.plots import Winner

KEY = DecisionKey(CommunicatorClass(2, 1), Collective.all_gather, Phase.other, 80)
FAST = Candidate(Algorithm.ring, Protocol.ll, 2)
OWN = Candidate(Algorithm.ring, Protocol.simple, 8)
SEEN = {"predicted_us": 92.0, "predicted_low_us": 80.0, "predicted_high_us": 99.0, "note": ""}


def line(candidate: Candidate, count: int, median_us: float) -> CandidateStatistics:
    return CandidateStatistics(KEY, candidate, candidate != FAST, count, median_us, median_us, 0.0, median_us, 0.0)


def decision(candidate: Candidate = FAST, alternatives: str = "[]") -> Decision:
    return Decision("j", "f", KEY, candidate, 1, "promote", "", 92.0, 80.0, 99.0, 100.0, alternatives=alternatives)


def test_what_was_measured_wins_and_the_nearest_first():
    here, everywhere = medians([line(OWN, 9, 200.0), line(FAST, 9, 162.0)]), medians([line(OWN, 9, 1.0)])
    found = compare(decision(), here, everywhere)
    assert (found.own, found.is_measured, str(found)) == (OWN, True, "-19 %")
    # The job never ran NCCL's own choice: other jobs did.
    found = compare(decision(), medians([line(FAST, 9, 50.0)]), here)
    assert (found.is_measured, str(found)) == (True, "-19 %")
    seen = json.dumps([{"candidate": str(FAST), "measured_us": 81.0}])
    assert str(compare(decision(alternatives=seen), {}, {})) == "-19 %"


def test_predictions_say_so():
    found = compare(decision(), {}, {})
    assert str(found) == "-8 % predicted"
    assert "predicted" in Winner("ring/ll", found.change_percent, found.is_measured).words(is_narrow=False)
    assert Winner("ring/ll", -1.0, is_measured=True).rank < Winner("ring/simple", -50.0, is_measured=False).rank
    assert str(compare(decision(BASELINE), {}, {})) == "+0 %"


def test_several_settings_that_nccl_chose_count_together():
    other = Candidate(Algorithm.ring, Protocol.ll128, 8)
    found = medians([line(other, 10, 130.0), line(OWN, 30, 100.0)])[KEY][BASELINE]
    assert (found.n_calls, found.setting) == (40, OWN)
    assert found.median_us == pytest.approx(107.5)


def test_explain_counts_this_job_and_all_jobs_at_one_time(tmp_path):
    """The decision saw 500 calls, of which the store has 3 by now, and 5 with another job's."""
    alternatives = [
        {**SEEN, "candidate": str(FAST), "measured_us": 81.0, "n_measurements": 500},
        {**SEEN, "candidate": "ring/simple/1ch", "measured_us": 90.0, "n_measurements": 7},
    ]
    with Store.open(tmp_path / "s.db") as store:
        for job_id, n in (("other", 2), ("job", 3)):
            store.record_job(job_id, "f", {}, 2)
            block = np.zeros(n, MEASUREMENT)
            block["n_ranks"], block["n_nodes"], block["message_bytes"], block["collective"] = 2, 1, 1 << 20, 2
            block["algorithm"], block["protocol"], block["n_channels"], block["duration_us"] = 1, 0, 2, 80.0
            store.record_measurements("f", job_id, block)
        key = DecisionKey(CommunicatorClass(2, 1), Collective.all_gather, Phase.other, size_class(1 << 20))
        store.record_decisions([Decision("job", "f", key, FAST, 1, "keep", "", alternatives=json.dumps(alternatives))])
        store.flush()
    (found,) = explain(tmp_path / "s.db", "job", None, None, None)
    counts = {one["candidate"]: (one["n_this_job"], one["n_all_jobs"]) for one in found.alternatives}
    assert counts == {str(FAST): (3, 5), "ring/simple/1ch": (7, 7)}
