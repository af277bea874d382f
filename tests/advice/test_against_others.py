"""The model behind `zerotune advise`, held to the ZeRO paper and to published runs."""

from __future__ import annotations

import pytest

from benchmarks.advice import advise_error, zero_paper
from benchmarks.advice.published_runs import published_runs
from zerotune.tuner.advice.constants import DEFAULT
from zerotune.tuner.advice.hardware.clusters import cluster


def test_the_paper_is_met():
    missed = [result.metric for result in zero_paper.results() if result.is_met is False]
    assert missed == []


def test_runs_set_aside_are_met():
    runs = published_runs()
    found = {result.metric: result for result in advise_error.results(runs)}
    assert found["held_out_runs_error_median"].is_met
    for kind in ("fitted", "held_out", "held_out_comparisons"):
        assert found[f"{kind}_in_range_share"].is_met, kind
    assert found["comparison_error_p90"].value == pytest.approx(DEFAULT.comparison_spread, rel=0.05)


def test_more_nodes_than_any_run_had_are_extrapolated():
    most = max(-(-run.n_gpus // run.gpus_per_node) for run in published_runs() if not run.is_set_aside)
    assert [cluster("dgx_h100", n_nodes, DEFAULT).is_extrapolated for n_nodes in (most, most + 1)] == [False, True]
