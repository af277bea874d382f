"""Channel counts that were never measured are doubted, even next to measured ones."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.lib.data.data_sets import fabric_problems, sweep_block
from benchmarks.modeling.prediction_held_out import ran_besides
from zerotune.agent.nccl import fabric
from zerotune.tuner.modeling.correction.kriging import Kriging
from zerotune.tuner.modeling.correction.training_set import TrainingSet, build
from zerotune.tuner.modeling.features import NO_CELL, CostPrior


@cache
def _points(name: str) -> TrainingSet:
    machine = fabric.load(name)
    facts = machine.describe()
    return build(sweep_block(fabric_problems(machine, facts, n_per_octave=0.5)), CostPrior(facts))


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
