"""Predictions away from what was measured: beyond the sizes, on fewer nodes, and between a few uneven sizes."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.lib.data.data_sets import fabric_problems, sweep_block
from benchmarks.lib.data.generated_grids import generated_grids
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, CommunicatorClass, Protocol, size_class
from zerotune.tuner.modeling import trainer
from zerotune.tuner.modeling.correction.baked import UNKNOWN_STD, Baked
from zerotune.tuner.modeling.correction.estimators import Kriging
from zerotune.tuner.modeling.correction.training_set import TrainingSet, build
from zerotune.tuner.modeling.features import CostPrior, Floats

MACHINE = fabric.load("h100_ib_16")
FACTS = MACHINE.describe()


@cache
def _points(n_ranks: int) -> TrainingSet:
    return build(_block(n_ranks), CostPrior(FACTS))


@cache
def _block(n_ranks: int) -> np.ndarray:
    return sweep_block(fabric_problems(MACHINE, FACTS, n_per_octave=0.25, n_ranks=n_ranks))


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


def test_what_was_learned_on_many_nodes_is_doubted_on_two() -> None:
    """NCCL's cost counts with another bandwidth up to two nodes."""
    two_nodes, many = _points(16), build(np.concatenate([_block(32), _block(64)]), CostPrior(FACTS))
    assert _inside(Kriging().fit(many), two_nodes) > 0.8


def test_doubt_grows_by_the_octave_away_from_the_measured_sizes() -> None:
    block = _block(64)
    record = trainer.fit(block[block["message_bytes"] >= 1 << 24], "fabric", FACTS)
    assert record is not None
    place = MACHINE.communicator(range(64))
    classes = np.array([size_class(1 << exponent) for exponent in (24, 22, 18, 10, 4)])
    asked = Candidate(Algorithm.ring, Protocol.simple, 8)
    _, std = Baked.from_bytes(record.blob).predict(place, Collective.all_gather, (asked,), classes)
    assert (np.diff(std[:, 0]) > 0).all()
    assert std[-1, 0] > UNKNOWN_STD


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


@pytest.mark.parametrize("name", ["x\0.toml", "x\ud800.toml", "\0"])
def test_what_no_file_can_be_called_describes_nothing(name: str) -> None:
    place, setting = MACHINE.communicator(range(16)), [Candidate(Algorithm.ring, Protocol.ll, 4)]
    found, unknown = (
        CostPrior({**FACTS, "emulated": emulated}).log_cost(place, Collective.all_gather, setting, 1 << 20)
        for emulated in (name, "none")
    )
    assert np.array_equal(found, unknown)


def test_a_communicator_that_the_described_machine_cannot_have_is_tuned_all_the_same() -> None:
    """NCCL counts a node whose rings go through network adapters as several."""
    costs, place = CostPrior(fabric.load("h100_node").describe()), CommunicatorClass(4, 2)
    assert len(costs.candidates(place, Collective.all_gather)) > 1
    assert np.isfinite(costs.log_cost(place, Collective.all_gather, [BASELINE], 1 << 20)).all()
