"""The model that corrects NCCL's cost, and the arrays that it is baked into."""

from __future__ import annotations

import numpy as np
import pytest

from zerotune.agent.nccl import cost_model, fabric
from zerotune.store.records import BASELINE, Candidate, Collective, CommunicatorClass, size_class
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.modeling import trainer
from zerotune.tuner.modeling.correction.baked import Baked
from zerotune.tuner.modeling.correction.kriging import Kriging
from zerotune.tuner.modeling.correction.training_set import build
from zerotune.tuner.modeling.cost_prior import CostPrior

PLACE = CommunicatorClass(16, 16)
EXPONENTS = range(12, 27, 2)


def _sweep(name: str = "ethernet_boxes", exponents: range = EXPONENTS, seed: int = 0) -> np.ndarray:
    machine = fabric.load(name)
    costs, rng = CostPrior(machine.describe()), np.random.default_rng(seed)
    topology = machine.topology(PLACE)
    rows = []
    for kind in (Collective.all_gather, Collective.reduce_scatter):
        for exponent in exponents:
            nbytes = 1 << exponent
            for candidate in costs.candidates(PLACE, kind):
                ran = candidate
                if candidate.is_baseline:
                    ran = cost_model.default_choice(topology, kind, nbytes)
                us = machine.truth_us(PLACE, kind, ran.algorithm, ran.protocol, ran.n_channels, nbytes)
                for _ in range(4):
                    row = np.zeros(1, MEASUREMENT)[0]
                    row["n_ranks"], row["n_nodes"], row["message_bytes"] = 16, 16, nbytes
                    row["duration_us"] = us * np.exp(rng.normal(0, 0.02))
                    row["collective"], row["n_channels"] = kind, ran.n_channels
                    row["algorithm"], row["protocol"] = ran.algorithm, ran.protocol
                    row["is_default"] = candidate.is_baseline
                    rows.append(row)
    return np.array(rows, MEASUREMENT)


@pytest.fixture(scope="module")
def swept() -> tuple[np.ndarray, CostPrior]:
    return _sweep(), CostPrior(fabric.load("ethernet_boxes").describe())


def test_predictions_are_finite_and_repeatable_even_from_one_point(swept: tuple[np.ndarray, CostPrior]) -> None:
    points = build(*swept)
    fitted = Kriging().fit(points)
    mean, std = fitted.predict(points)
    assert mean.shape == std.shape == (len(points),)
    assert np.isfinite(mean).all()
    assert (std > 0).all()
    again, _ = Kriging().fit(points).predict(points)
    np.testing.assert_allclose(mean, again)
    few = points.take(np.arange(1))
    assert np.isfinite(Kriging().fit(few).predict(points)[0]).all()


def test_the_model_is_nearer_than_the_cost_at_sizes_left_out(swept: tuple[np.ndarray, CostPrior]) -> None:
    points = build(*swept)
    error = trainer.held_out_error(Kriging().fit(points), points)
    assert error is not None
    assert 0.0 < error < 0.5 * float(np.median(np.abs(points.residual)))


def test_a_model_survives_its_bytes_and_refuses_damaged_ones(swept: tuple[np.ndarray, CostPrior]) -> None:
    record = trainer.fit(swept[0], "f", fabric.load("ethernet_boxes").describe())
    assert record is not None
    baked = Baked.from_bytes(record.blob)
    options = (BASELINE, Candidate(*_cell(), 4))
    classes = np.array([size_class(1 << 20)])
    for found, expected in zip(
        baked.predict(PLACE, Collective.all_gather, options, classes),
        Baked.from_bytes(baked.to_bytes()).predict(PLACE, Collective.all_gather, options, classes),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)
    rng = np.random.default_rng(1)
    for cut in (0, 10, len(record.blob) // 2, len(record.blob) - 5):
        with pytest.raises(ValueError, match="model"):
            Baked.from_bytes(record.blob[:cut])
    for _ in range(30):
        damaged = bytearray(record.blob)
        damaged[rng.integers(len(damaged))] ^= 0xFF
        try:
            Baked.from_bytes(bytes(damaged))
        except ValueError:
            continue


def _cell() -> tuple:
    return next((c.algorithm, c.protocol) for c in _options() if c.algorithm is not None)


def _options() -> tuple[Candidate, ...]:
    return CostPrior(fabric.load("ethernet_boxes").describe()).candidates(PLACE, Collective.all_gather)
