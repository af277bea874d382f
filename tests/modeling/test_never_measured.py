"""What measured cells tell of cells that were never measured: algorithms and protocols nobody has tried here."""

from __future__ import annotations

import numpy as np

from benchmarks.lib.data.data_sets import sweep_block
from benchmarks.lib.data.generated_grids import generated_grids
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Protocol, size_class
from zerotune.tuner.modeling import trainer
from zerotune.tuner.modeling.correction.kriging import Kriging
from zerotune.tuner.modeling.correction.training_set import TrainingSet, build
from zerotune.tuner.modeling.features import CostPrior

PLACE = CommunicatorClass(8, 8)
LL = Candidate(Algorithm.ring, Protocol.ll, 0)
SLOWER = 1.5
"""How much (log) slower than believed everything is."""


def _points(collective: Collective, protocols: tuple[Protocol, ...], shift: float = SLOWER) -> TrainingSet:
    """Rings of some protocols at eight sizes, all `shift` slower than believed."""
    log2_bytes = np.tile(np.arange(16.0, 24.0), len(protocols))
    ones = np.ones(len(log2_bytes), dtype=np.int64)
    noise = np.full(len(log2_bytes), 0.02)
    residual = shift + np.random.default_rng(4).normal(0, 0.02, len(log2_bytes))
    return TrainingSet(
        8 * ones,
        8 * ones,
        int(collective) * ones,
        int(Algorithm.ring) * ones,
        np.repeat([int(protocol) for protocol in protocols], 8),
        64 * ones,
        log2_bytes,
        residual,
        noise,
        3 * ones,
        np.zeros(len(log2_bytes)),
        np.zeros(len(log2_bytes)),
    )


def _asked_of_ll(points: TrainingSet) -> tuple[float, float]:
    baked = trainer.bake(Kriging().fit(points), points, CostPrior({}))
    mean, std = baked.predict(PLACE, Collective.all_gather, (LL,), np.array([size_class(1 << 20)]))
    return float(mean[0, 0]), float(std[0, 0])


def test_what_was_never_measured_is_doubted_more() -> None:
    protocols = (Protocol.simple, Protocol.ll128)
    _, doubt = _asked_of_ll(_points(Collective.all_gather, protocols))
    _, measured = _asked_of_ll(_points(Collective.all_gather, (*protocols, Protocol.ll)))
    assert doubt > measured


def test_intervals_hold_for_cells_left_out() -> None:
    inside, gaps, kept = [], [], []
    for _, problems in generated_grids(range(300, 310), jumpy=False):
        points = build(sweep_block(problems), CostPrior({}))
        for protocol in np.unique(points.protocol[points.algorithm == int(Algorithm.ring)]):
            held = (points.algorithm == int(Algorithm.ring)) & (points.protocol == protocol)
            left_out = points.take(held)
            mean, std = Kriging().fit(points.take(~held)).predict(left_out)
            gap = np.abs(left_out.residual - mean)
            inside.append(np.mean(gap <= 1.645 * np.hypot(std, left_out.noise)))
            gaps.append(np.median(gap))
            kept.append(np.median(np.abs(left_out.residual)))
    assert np.mean(inside) > 0.8
    assert np.median(gaps) < 0.5 * np.median(kept), "NCCL's cost alone would be much further off"
