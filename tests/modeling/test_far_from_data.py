"""Predictions away from what was measured: beyond the sizes, on fewer nodes, and between a few uneven sizes."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.data.data_sets import sweep_block
from benchmarks.lib.data.undescribed_machines import undescribed_machine
from zerotune.agent.nccl import fabric
from zerotune.store.records import Algorithm, Candidate, Collective, Protocol
from zerotune.tuner.modeling.correction.kriging import Kriging
from zerotune.tuner.modeling.correction.training_set import TrainingSet, build
from zerotune.tuner.modeling.cost_prior import CostPrior

MACHINE = fabric.load("h100_ib_16")
FACTS = MACHINE.describe()


def _inside(model: Kriging, points: TrainingSet) -> float:
    """Share of the points inside their 90 % intervals."""
    mean, std = model.predict(points)
    return float(np.mean(np.abs(points.residual - mean) <= 1.645 * np.hypot(std, points.noise)))


@pytest.mark.parametrize("end", ["below", "above"])
@pytest.mark.slow
def test_intervals_hold_beyond_the_measured_sizes(end: str) -> None:
    found = []
    for seed in range(100, 106):
        points = build(sweep_block(undescribed_machine(seed, 0.03, (4,)).problems), CostPrior({}))
        classes = np.unique(points.size_class)
        n_held = len(classes) // 3
        held = np.isin(points.size_class, classes[:n_held] if end == "below" else classes[-n_held:])
        found.append(_inside(Kriging().fit(points.take(~held)), points.take(held)))
    assert np.mean(found) > 0.8


def test_another_fabric_of_the_same_name_describes_nothing() -> None:
    """A user's `./h100_ib_16.toml` reaches the daemon by its name, under which another file lies."""
    place, size = MACHINE.communicator(range(16)), 1 << 20
    usual, named, unknown = (
        CostPrior(facts).log_cost(place, Collective.all_gather, [Candidate(Algorithm.ring, Protocol.ll, 4)], size)
        for facts in (FACTS, {**FACTS, "fabric_id": "emulated-h100_ib_16-000000000000"}, {**FACTS, "emulated": "none"})
    )
    assert np.array_equal(named, unknown)
    assert not np.array_equal(named, usual)
