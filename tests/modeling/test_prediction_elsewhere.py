"""Rank counts and fabrics that were never measured: judged on anybody's files, doubted where NCCL's cost jumps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.data import generated_csvs
from benchmarks.lib.data.data_sets import DataSet, of_folder, sweep_block
from benchmarks.modeling.prediction_first_step import after_the_first_step, as_a_job_begins
from benchmarks.modeling.prediction_verdicts import looked_up
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, CommunicatorClass, Protocol, size_class
from zerotune.tuner.learning.knowledge import LEVEL_STD, Knowledge
from zerotune.tuner.learning.policy.keys import COMMON_DOUBT, FieldBook
from zerotune.tuner.modeling import trainer
from zerotune.tuner.modeling.correction.baked import UNKNOWN_STD, Baked
from zerotune.tuner.modeling.correction.estimators import Kriging
from zerotune.tuner.modeling.correction.training_set import build
from zerotune.tuner.modeling.features import CostPrior

RING = Candidate(Algorithm.ring, Protocol.simple, 8)


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


@pytest.fixture
def two_and_eight_nodes(tmp_path: Path, few_settings: None) -> tuple[DataSet, Knowledge]:
    """A machine without any jump on 1, 2, 4 and 8 nodes, and what its sweep on 2 and 8 tells the daemon."""
    generated_csvs.write(tmp_path / "smooth.csv", 321, 0.02, (1, 2, 4, 8))
    (data,) = of_folder(tmp_path)
    points = build(sweep_block(data.problems), CostPrior({}))
    known = points.take(np.isin(points.n_nodes, (2, 8)))
    return data, Knowledge((), trainer.bake(Kriging().fit(known), known, CostPrior({})))


def _doubt(knowledge: Knowledge, n_nodes: int, *, carries_over: bool = True) -> float:
    place, nbytes = CommunicatorClass(8 * n_nodes, n_nodes), np.array([float(1 << 24)])
    asked = place, Collective.all_gather, (RING,), nbytes, np.array([size_class(1 << 24)]), CostPrior({})
    return float(knowledge.guess(*asked, carries_over=carries_over)[1][0, 0])


def test_arrays_looked_up_for_one_node_hold_where_the_cost_jumps_and_the_machine_does_not(
    two_and_eight_nodes: tuple[DataSet, Knowledge],
) -> None:
    data, knowledge = two_and_eight_nodes
    points, correction = build(sweep_block(data.problems), CostPrior({})), knowledge.correction
    assert isinstance(correction, Baked)
    test = points.take(points.n_nodes == 1)
    mean, std = looked_up(correction, test, CostPrior({}))
    assert np.mean(np.abs(test.residual - mean) <= 1.645 * np.hypot(std, test.noise)) > 0.8


def test_a_rank_count_between_measured_ones_is_doubted_a_little(
    two_and_eight_nodes: tuple[DataSet, Knowledge],
) -> None:
    _, knowledge = two_and_eight_nodes
    assert _doubt(knowledge, 8) < _doubt(knowledge, 4) < 0.5 * _doubt(knowledge, 1)


def test_what_all_guesses_may_be_off_together_keeps_no_trial_away(
    two_and_eight_nodes: tuple[DataSet, Knowledge],
) -> None:
    """What runs on one node tells of it at once; taken for each setting's own, it would make every trial too risky."""
    _, knowledge = two_and_eight_nodes
    book = FieldBook(CostPrior({}))
    book.knowledge = knowledge
    assert book.family((CommunicatorClass(8, 1), Collective.all_gather)).doubt_in_common > 0.5
    assert book.family((CommunicatorClass(32, 4), Collective.all_gather)).doubt_in_common == LEVEL_STD
    assert _doubt(knowledge, 1, carries_over=False) < 0.5 * _doubt(knowledge, 1)


@pytest.mark.usefixtures("few_settings")
def test_a_fabric_never_measured_is_doubted_as_the_daemon_doubts_it(tmp_path: Path) -> None:
    generated_csvs.write(tmp_path / "own.csv", 1, 0.02, (4,))
    (data,) = of_folder(tmp_path)
    points = build(sweep_block(data.problems), CostPrior({}))
    shift, doubt = as_a_job_begins(points, CostPrior({}))
    assert not shift.any()
    np.testing.assert_allclose(doubt, np.hypot(UNKNOWN_STD, COMMON_DOUBT))
    assert (as_a_job_begins(points, CostPrior(fabric.load("h100_ib_16").describe()))[1] == UNKNOWN_STD).all()


@pytest.mark.usefixtures("few_settings")
def test_the_first_step_tells_what_all_guesses_are_off_together(tmp_path: Path) -> None:
    """Where nobody described the machine, its scale is learned from NCCL's own choice: all untried settings are judged
    as on one that is four times as fast.
    """
    generated_csvs.write(tmp_path / "own.csv", 1, 0.02, (4,))
    (data,) = of_folder(tmp_path)
    assert isinstance(data, DataSet)
    slower = [replace(one, truth_us=tuple(4.0 * us for us in one.truth_us)) for one in data.problems]
    scores = after_the_first_step(data)
    assert len(scores) == sum(len(problem.candidates) - 1 for problem in data.problems)
    moved = after_the_first_step(DataSet("slower", slower, data.facts)) - scores
    assert np.median(np.abs(moved)) < 0.25 * np.log(4.0) / UNKNOWN_STD


def test_the_cost_jumps_up_to_two_nodes_of_described_machines_and_on_one_of_others() -> None:
    described, generic = CostPrior(fabric.load("h100_ib_16").describe()), CostPrior({})
    jumps = {
        (name, n_nodes): abs(
            costs.log_jump(CommunicatorClass(8 * n_nodes, n_nodes), Collective.all_gather, (RING,), 1 << 26)[0, 0]
        )
        for name, costs in (("described", described), ("generic", generic))
        for n_nodes in (1, 2, 3, 8)
    }
    assert {place for place, jump in jumps.items() if jump > 0.1} == {
        ("described", 1),
        ("described", 2),
        ("generic", 1),
    }
    one_node = CostPrior(fabric.load("h100_node").describe())
    assert not one_node.log_jump(CommunicatorClass(8, 1), Collective.all_gather, (BASELINE, RING), [1 << 26]).any()
