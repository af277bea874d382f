"""Predictions away from what was measured: beyond the sizes, on fewer nodes, and between a few uneven sizes."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.data.data_sets import sweep_block
from benchmarks.lib.data.generated_grids import generated_grids
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, CommunicatorClass, Protocol
from zerotune.tuner.modeling.correction.kriging import Kriging
from zerotune.tuner.modeling.correction.training_set import TrainingSet, build
from zerotune.tuner.modeling.features import CostPrior, Floats

MACHINE = fabric.load("h100_ib_16")
FACTS = MACHINE.describe()


def _inside(model: Kriging, points: TrainingSet) -> float:
    """Share of the points inside their 90 % intervals."""
    mean, std = model.predict(points)
    return float(np.mean(np.abs(points.residual - mean) <= 1.645 * np.hypot(std, points.noise)))


@pytest.mark.parametrize("end", ["below", "above"])
def test_intervals_hold_beyond_the_measured_sizes(end: str) -> None:
    found = []
    for _, problems in generated_grids([*range(12), *range(200, 212)], jumpy=False):
        points = build(sweep_block(problems), CostPrior({}))
        classes = np.unique(points.size_class)
        n_held = len(classes) // 3
        held = np.isin(points.size_class, classes[:n_held] if end == "below" else classes[-n_held:])
        found.append(_inside(Kriging().fit(points.take(~held)), points.take(held)))
    assert np.mean(found) > 0.8


def test_one_bad_recording_of_eight_does_not_bend_the_rest() -> None:
    """Two settings of nearly straight cost, one size of one of them recorded 35 % too slow."""
    log2_bytes = np.tile(np.arange(20.0, 28.0), 2)
    truth = np.repeat([0.4, 0.7], 8)
    recorded = truth + np.where(np.arange(16) == 5, 0.3, 0.0) + np.random.default_rng(2).normal(0, 0.02, 16)
    points = _two_settings(log2_bytes, recorded)
    for at in (1, 2, 7, 10, 13):
        mean, _ = Kriging().fit(points.take(np.arange(16) != at)).predict(points)
        assert abs(mean[at] - truth[at]) < 0.12


def _two_settings(log2_bytes: Floats, residual: Floats) -> TrainingSet:
    ones = np.ones(16, dtype=np.int64)
    protocol = np.repeat([int(Protocol.ll), int(Protocol.simple)], 8)
    noise = np.full(16, 0.02)
    kind, ring = int(Collective.reduce_scatter) * ones, int(Algorithm.ring) * ones
    return TrainingSet(
        2 * ones,
        2 * ones,
        kind,
        ring,
        protocol,
        64 * ones,
        log2_bytes,
        residual,
        noise,
        ones,
        np.zeros(16),
        np.zeros(16),
    )


def test_another_fabric_of_the_same_name_describes_nothing() -> None:
    """A user's `./h100_ib_16.toml` reaches the daemon by its name, under which another file lies."""
    place, size = MACHINE.communicator(range(16)), 1 << 20
    usual, named, unknown = (
        CostPrior(facts).log_cost(place, Collective.all_gather, [Candidate(Algorithm.ring, Protocol.ll, 4)], size)
        for facts in (FACTS, {**FACTS, "fabric_id": "emulated-h100_ib_16-000000000000"}, {**FACTS, "emulated": "none"})
    )
    assert np.array_equal(named, unknown)
    assert not np.array_equal(named, usual)


def test_a_communicator_that_the_described_machine_cannot_have_is_tuned_all_the_same() -> None:
    """NCCL counts a node whose rings go through network adapters as several."""
    costs, place = CostPrior(fabric.load("h100_node").describe()), CommunicatorClass(4, 2)
    assert len(costs.candidates(place, Collective.all_gather)) > 1
    assert np.isfinite(costs.log_cost(place, Collective.all_gather, [BASELINE], 1 << 20)).all()
