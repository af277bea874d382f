"""Channel counts that were never measured are doubted, even next to measured ones."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.data.data_sets import fabric_problems, sweep_block
from benchmarks.modeling.prediction_held_out import ran_besides
from zerotune.agent.nccl import cost_model, fabric
from zerotune.store.records import Algorithm, Candidate, Collective, Protocol, size_class
from zerotune.tuner.modeling import trainer
from zerotune.tuner.modeling.correction.baked import Baked
from zerotune.tuner.modeling.correction.estimators import Kriging
from zerotune.tuner.modeling.correction.training_set import TrainingSet, build
from zerotune.tuner.modeling.features import NO_CELL, CostPrior, channels_filled

LARGE, SMALL = 64 << 20, 32 << 10
"""Bytes for more channels than there are, and for two."""


@cache
def _points(name: str) -> TrainingSet:
    machine = fabric.load(name)
    facts = machine.describe()
    return build(sweep_block(fabric_problems(machine, facts, n_per_octave=0.5)), CostPrior(facts))


@cache
def _baked(name: str, without: int = 0) -> Baked:
    points = _points(name)
    known = points.take((points.n_channels != without) | (points.algorithm == NO_CELL))
    return _bake(name, known)


def _bake(name: str, known: TrainingSet) -> Baked:
    return trainer.bake(Kriging().fit(known), known, CostPrior(fabric.load(name).describe()))


def _doubt(baked: Baked, n_channels: int, nbytes: int) -> float:
    place = fabric.load("h100_node").communicator(range(8))
    asked = Candidate(Algorithm.ring, Protocol.simple, n_channels)
    return float(baked.predict(place, Collective.all_gather, (asked,), np.array([size_class(nbytes)]))[1][0, 0])


@pytest.mark.parametrize("name", ["ethernet_boxes", "h100_node"])
def test_intervals_hold_for_counts_left_out(name: str) -> None:
    points = _points(name)
    named = points.algorithm != NO_CELL
    inside = []
    for count in np.unique(points.n_channels[named])[1:]:
        held = named & (points.n_channels == count)
        left_out = points.take(held & ~ran_besides(points, held))
        mean, std = Kriging().fit(points.take(~held)).predict(left_out)
        inside.append(np.mean(np.abs(left_out.residual - mean) <= 1.645 * np.hypot(std, left_out.noise)))
    assert np.mean(inside) > 0.8


def test_a_count_next_to_a_measured_one_is_doubted() -> None:
    assert _doubt(_baked("h100_node", without=16), 16, LARGE) > 0.05
    assert _doubt(_baked("h100_node"), 16, LARGE) < 0.03


def test_a_count_that_nccl_clamps_to_a_measured_one_is_known() -> None:
    baked = _baked("h100_node", without=16)
    assert _doubt(baked, 16, SMALL) < 0.5 * _doubt(baked, 16, LARGE)


def test_a_cell_is_doubted_less_where_others_were_measured_with_the_count() -> None:
    points = _points("h100_node")
    ring = (points.algorithm == int(Algorithm.ring)) & (points.protocol == int(Protocol.simple))
    known = points.take(~(ring & (points.n_channels == 16)))
    of_cell = _doubt(_bake("h100_node", known), 16, LARGE)
    assert _doubt(_baked("h100_node"), 16, LARGE) < of_cell < _doubt(_baked("h100_node", without=16), 16, LARGE)


@given(
    st.sampled_from(Collective), st.sampled_from(Protocol), st.integers(1, 1 << 40), st.sampled_from([1, 2, 8, 24, 64])
)
def test_arrays_know_the_channels_that_little_traffic_fills_as_the_cost_model_does(
    collective: Collective, protocol: Protocol, message_bytes: int, n_channels: int
) -> None:
    filled = channels_filled([int(collective)], [int(protocol)], [message_bytes], [n_channels])
    assert filled.tolist() == [cost_model.channels_filled(collective, protocol, message_bytes, n_channels)]
