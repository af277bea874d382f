"""The models that may correct NCCL's cost, all of one shape: `fit(points)`, then `predict(points)`.

scikit-learn is imported inside the fitting functions only: these run in the trainer's own process. Adding
a model means a class here and a line in `MODELS`; the contract tests find it there.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np

from zerotune.tuner.modeling.correction.baked import UNKNOWN_STD
from zerotune.tuner.modeling.correction.columns import SEED, Kind, is_kind, is_known, kinds_of, numeric, one_hot
from zerotune.tuner.modeling.correction.kriging import Kriging
from zerotune.tuner.modeling.correction.training_set import TrainingSet
from zerotune.tuner.modeling.features import Floats


class Estimator(Protocol):
    """A model of `TrainingSet.residual`. Predictions ignore the residual, noise and count of their input.

    It is also asked about cells that were never measured: these must be doubted more than others.
    """

    name: str

    def fit(self, points: TrainingSet) -> Estimator:
        """Learn from at least one point; returns self."""
        ...

    def predict(self, points: TrainingSet) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the residual of every point, shapes [n]."""
        ...


class Uncorrected:
    """NCCL's cost as it is: the baseline that every other model must beat."""

    name = "cost"

    def fit(self, points: TrainingSet) -> Uncorrected:
        """Learn how far off the cost is, nothing else."""
        self._spread = max(0.01, float(np.sqrt(np.mean(points.residual**2))))
        return self

    def predict(self, points: TrainingSet) -> tuple[Floats, Floats]:
        """No correction."""
        return np.zeros(len(points)), np.full(len(points), self._spread)


class Ridge:
    """Linear in the logs of bytes, channels, ranks and nodes, with own terms for every cell."""

    name = "ridge"

    def fit(self, points: TrainingSet) -> Ridge:
        """Bayesian ridge regression."""
        from sklearn.linear_model import BayesianRidge

        self._cells = kinds_of(points)
        self._regression = BayesianRidge().fit(self._design(points), points.residual)
        return self

    def predict(self, points: TrainingSet) -> tuple[Floats, Floats]:
        """Posterior predictive of the regression."""
        mean, std = self._regression.predict(self._design(points), return_std=True)
        return np.asarray(mean), _doubted(points, self._cells, np.maximum(np.asarray(std), 0.005))

    def _design(self, points: TrainingSet) -> Floats:
        scaled = numeric(points) / np.array([10.0, 3.0, 4.0, 4.0])
        terms = np.column_stack([np.ones(len(points)), scaled, scaled[:, :2] ** 2])
        cells = one_hot(points, self._cells)
        return np.column_stack([terms, *(cells[:, [column]] * terms for column in range(cells.shape[1]))])


class Neighbour:
    """The residual of the nearest measured point of the same collective and cell."""

    name = "neighbour"

    def fit(self, points: TrainingSet) -> Neighbour:
        """Remember the points."""
        self._points = points
        return self

    def predict(self, points: TrainingSet) -> tuple[Floats, Floats]:
        """Nearest in octaves; the spread grows with the distance."""
        mean, std = np.zeros(len(points)), np.full(len(points), UNKNOWN_STD)
        known, asked = numeric(self._points), numeric(points)
        for kind in kinds_of(points):
            here = np.flatnonzero(is_kind(points, kind))
            there = np.flatnonzero(is_kind(self._points, kind))
            if len(there):
                gaps = np.abs(asked[here][:, None, :] - known[there][None, :, :]).sum(axis=2)
                nearest = np.argmin(gaps, axis=1)
                mean[here] = self._points.residual[there[nearest]]
                std[here] = 0.02 + 0.08 * np.sqrt(gaps[np.arange(len(here)), nearest])
        return mean, std


class Forest:
    """Extremely randomised trees: a decision-tree peer that interpolates."""

    name = "forest"

    def fit(self, points: TrainingSet) -> Forest:
        """Grow the trees."""
        from sklearn.ensemble import ExtraTreesRegressor

        self._cells = kinds_of(points)
        self._trees = ExtraTreesRegressor(
            n_estimators=100, min_samples_leaf=1, max_features=0.8, random_state=SEED
        ).fit(self._design(points), points.residual)
        return self

    def predict(self, points: TrainingSet) -> tuple[Floats, Floats]:
        """Mean and spread over the trees."""
        design = self._design(points)
        votes = np.stack([tree.predict(design) for tree in self._trees.estimators_])
        return votes.mean(axis=0), _doubted(points, self._cells, np.maximum(votes.std(axis=0), 0.01))

    def _design(self, points: TrainingSet) -> Floats:
        return np.column_stack([numeric(points), one_hot(points, self._cells)])


def _doubted(points: TrainingSet, kinds: list[Kind], std: Floats) -> Floats:
    """`std`, but at least that of no knowledge where the cell was never measured."""
    result: Floats = np.where(is_known(points, kinds), std, np.maximum(std, UNKNOWN_STD))
    return result


MODELS: Final[dict[str, type[Any]]] = {model.name: model for model in (Uncorrected, Ridge, Neighbour, Forest, Kriging)}
WINNER: Final = Kriging.name


__all__ = ["MODELS", "WINNER", "Estimator", "Kriging"]
