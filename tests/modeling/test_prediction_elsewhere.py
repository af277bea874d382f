"""Rank counts and fabrics that were never measured: judged on anybody's files, doubted where NCCL's cost jumps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.data import generated_csvs
from benchmarks.lib.data.data_sets import DataSet, of_folder, sweep_block
from zerotune.agent.nccl import fabric
from zerotune.store.records import Collective
from zerotune.tuner.learning.policy.keys import COMMON_DOUBT, CandidateTables
from zerotune.tuner.modeling.correction.kriging import Kriging
from zerotune.tuner.modeling.correction.training_set import build
from zerotune.tuner.modeling.features import CostPrior


@pytest.fixture
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_csvs, "SETTINGS", generated_csvs.SETTINGS[:3])
    monkeypatch.setattr(generated_csvs, "CHANNELS", (4, 16))
    monkeypatch.setattr(generated_csvs, "SIZES", generated_csvs.SIZES[::4])


@pytest.mark.usefixtures("few_settings")
@pytest.mark.parametrize("n_nodes", [1, 2])
def test_intervals_hold_where_the_cost_jumps_and_the_machine_does_not(n_nodes: int, tmp_path: Path) -> None:
    """NCCL's cost has other rates on one node; this machine has the same everywhere."""
    generated_csvs.write(tmp_path / "smooth.csv", 320, 0.02, (1, 2, 4, 8, 16))
    (data,) = of_folder(tmp_path)
    assert isinstance(data, DataSet)
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
