"""Rank counts and fabrics that were never measured: doubted where NCCL's cost jumps."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.data import undescribed_machines
from benchmarks.lib.data.data_sets import sweep_block
from zerotune.agent.nccl import fabric
from zerotune.store.records import Collective
from zerotune.tuner.learning.policy.keys import COMMON_DOUBT, CandidateTables
from zerotune.tuner.modeling.correction.kriging import Kriging
from zerotune.tuner.modeling.correction.training_set import build
from zerotune.tuner.modeling.cost_prior import CostPrior


@pytest.fixture
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undescribed_machines, "SETTINGS", undescribed_machines.SETTINGS[:3])
    monkeypatch.setattr(undescribed_machines, "CHANNELS", (4, 16))
    monkeypatch.setattr(undescribed_machines, "SIZES", undescribed_machines.SIZES[::4])


@pytest.mark.usefixtures("few_settings")
@pytest.mark.parametrize("n_nodes", [1, 2])
def test_intervals_hold_where_the_cost_jumps_and_the_machine_does_not(n_nodes: int) -> None:
    """NCCL's cost has other rates on one node; this machine has the same everywhere."""
    data = undescribed_machines.undescribed_machine(320, 0.02, (1, 2, 4, 8, 16))
    points = build(sweep_block(data.problems), CostPrior({}))
    held = points.n_nodes == n_nodes
    test = points.take(held)
    mean, std = Kriging().fit(points.take(~held)).predict(test)
    assert np.mean(np.abs(test.residual - mean) <= 1.645 * np.hypot(std, test.noise)) > 0.8


def test_a_fabric_never_measured_is_doubted_as_a_whole_unless_it_is_described() -> None:
    machine = fabric.load("h100_ib_16")
    family = machine.communicator(range(16)), Collective.all_gather
    assert CandidateTables(CostPrior({})).family(family).doubt_in_common == COMMON_DOUBT
    assert CandidateTables(CostPrior(machine.describe())).family(family).doubt_in_common == 0.0
