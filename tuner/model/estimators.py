"""The models that may correct NCCL's cost, all of one shape: `fit(points)`, then `predict(points)`.

scikit-learn is imported inside the fitting functions only: these run in the trainer's own process. Adding
a model means a class here and a line in `MODELS`; the contract tests find it there.
"""

from __future__ import annotations

import warnings
from typing import Any, Final, Protocol

import numpy as np

from tuner.features import DEFAULT_CELL, Floats, Ints
from tuner.model.baked import FAR_STD, UNKNOWN_STD
from tuner.model.training_set import TrainingSet

COVERAGE: Final = 0.9
SCALE_LIMITS: Final = (0.2, 6.0)
UNCALIBRATED: Final = 1.5
"""Factor on the spread with too few sizes to hold any out."""
BEYOND: Final = 2.0
"""Factor on the spread beyond the measured sizes, before anything was held out; it weighs as much as six sizes."""
_BEYOND_WEIGHT: Final = 6.0
_Z: Final = 1.645
NEVER_MEASURED: Final = 1.5
"""Factor on the spread of cells that were never measured, before any were held out; it weighs as much as four cells."""
_NEVER_MEASURED_WEIGHT: Final = 4.0
_SAME_SIZE: Final = 0.25
"""Octaves within which two sizes are of one class."""
_SEED: Final = 7


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

        self._cells = _known_cells(points)
        self._regression = BayesianRidge().fit(self._design(points), points.residual)
        return self

    def predict(self, points: TrainingSet) -> tuple[Floats, Floats]:
        """Posterior predictive of the regression."""
        mean, std = self._regression.predict(self._design(points), return_std=True)
        return np.asarray(mean), _doubted(points, self._cells, np.maximum(np.asarray(std), 0.005))

    def _design(self, points: TrainingSet) -> Floats:
        scaled = _numeric(points) / np.array([10.0, 3.0, 4.0, 4.0])
        numeric = np.column_stack([np.ones(len(points)), scaled, scaled[:, :2] ** 2])
        cells = _one_hot(points, self._cells)
        return np.column_stack([numeric, *(cells[:, [column]] * numeric for column in range(cells.shape[1]))])


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
        known, asked = _numeric(self._points), _numeric(points)
        for kind in _kinds(points):
            here = np.flatnonzero(_is_kind(points, kind))
            there = np.flatnonzero(_is_kind(self._points, kind))
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

        self._cells = _known_cells(points)
        self._trees = ExtraTreesRegressor(
            n_estimators=100, min_samples_leaf=1, max_features=0.8, random_state=_SEED
        ).fit(self._design(points), points.residual)
        return self

    def predict(self, points: TrainingSet) -> tuple[Floats, Floats]:
        """Mean and spread over the trees."""
        design = self._design(points)
        votes = np.stack([tree.predict(design) for tree in self._trees.estimators_])
        return votes.mean(axis=0), _doubted(points, self._cells, np.maximum(votes.std(axis=0), 0.01))

    def _design(self, points: TrainingSet) -> Floats:
        return np.column_stack([_numeric(points), _one_hot(points, self._cells)])


class Kriging:
    """A Gaussian process on logs: smooth in bytes, channels, ranks and nodes, one surface per cell.

    Two Matern terms: what all cells share, and what belongs to one cell; how much of the latter a collective has in
    common with the others is learned. So cells that were never measured get what all share and what they show in
    other collectives, and the doubt that cells left out ask for. The surface of a cell may have several minima over
    channels. Whether there are more than two nodes is an input of its own, as NCCL's cost counts with another
    bandwidth up to two. Length scales are the most probable ones on a sample of the points,
    given that they are usually near the starting values: a grid of eight sizes says little about them.
    """

    name = "kriging"

    def fit(self, points: TrainingSet) -> Kriging:
        """Fit hyperparameters on a sample, then condition on every point."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

        self._cells = _known_cells(points)
        design = self._design(points)
        n_columns = design.shape[1]
        n_flags = n_columns - 5
        n_collectives = len(np.unique(points.collective))
        n_others = n_flags - n_collectives
        shared = ConstantKernel(0.5, (1e-3, 4.0)) * Matern(
            [20.0, 4.0, 4.0, 4.0, 1.0, *[1e3] * n_flags],
            [(1.0, 60.0), (0.7, 40.0), (0.5, 60.0), (0.5, 60.0), (0.4, 100.0), *[(999.0, 1001.0)] * n_flags],
            nu=1.5,
        )
        own = ConstantKernel(0.2, (1e-3, 4.0)) * Matern(
            [8.0, 2.0, 3.0, 3.0, 1.0, *[1.5] * n_collectives, *[0.4] * n_others],
            [
                *[(1.0, 30.0), (0.4, 20.0), (0.5, 40.0), (0.5, 40.0), (0.4, 100.0)],
                *[(0.4, 20.0)] * n_collectives,
                *[(0.399, 0.401)] * n_others,
            ],
            nu=1.5,
        )
        kernel: Any = shared + own + WhiteKernel(1e-3, (1e-6, 0.5))
        sample = _sample(points, 220)
        tuned = GaussianProcessRegressor(
            kernel, alpha=points.noise[sample] ** 2, optimizer=_most_probable, random_state=_SEED
        )
        with warnings.catch_warnings():
            # Most flags' scales are pinned by tight bounds on purpose; being at them is no news.
            warnings.simplefilter("ignore", ConvergenceWarning)
            tuned.fit(design[sample], points.residual[sample])
        self._process = GaussianProcessRegressor(tuned.kernel_, alpha=points.noise**2, optimizer=None)
        self._process.fit(design, points.residual)
        inverse = np.linalg.inv(self._process.L_)
        self._precision, self._alpha = inverse.T @ inverse, np.asarray(self._process.alpha_).reshape(-1)
        self._known_ranks = np.unique(points.n_ranks)
        all_known, owner = _bytes_per_rank(points), np.zeros(len(points), dtype=np.int64)
        self._known_bytes, self._all_bytes = {}, (float(all_known.min()), float(all_known.max()))
        for at, kind in enumerate(self._cells):
            here = _is_kind(points, kind)
            owner[here] = at
            self._known_bytes[kind] = float(all_known[here].min()), float(all_known[here].max())
        self._scale = self._calibrate(points.size_class, UNCALIBRATED)
        self._scale_elsewhere = max(self._scale, self._calibrate(points.n_ranks, 2.0 * self._scale))
        self._scale_beyond = max(self._scale, self._calibrate_beyond(points.size_class))
        self._scale_unmeasured = max(self._scale, self._calibrate_unmeasured(owner))
        return self

    def predict(self, points: TrainingSet) -> tuple[Floats, Floats]:
        """Posterior mean and calibrated spread."""
        design = self._design(points)
        parts = [
            self._process.predict(design[start : start + 8192], return_std=True)
            for start in range(0, len(design), 8192)
        ]
        mean = np.concatenate([part[0] for part in parts]) if parts else np.zeros(0)
        std = np.concatenate([part[1] for part in parts]) if parts else np.zeros(0)
        scale = np.where(np.isin(points.n_ranks, self._known_ranks), self._scale, self._scale_elsewhere)
        octaves = self._octaves_beyond(points)
        scale = np.where(octaves > 0, np.maximum(scale, self._scale_beyond), scale)
        scale = np.where(_is_known(points, self._cells), scale, np.maximum(scale, self._scale_unmeasured))
        return mean, np.maximum(np.hypot(std * scale, FAR_STD * octaves), 0.003)

    def left_out(self, index: Ints) -> Floats:
        """Measured minus predicted residual of the points at `index`, had none of them been known: exact."""
        block = np.linalg.inv(self._precision[np.ix_(index, index)])
        errors: Floats = block @ self._alpha[index]
        return errors

    def _scores(self, index: Ints) -> Floats:
        """`left_out` over the spread that the process would have had."""
        block = np.linalg.inv(self._precision[np.ix_(index, index)])
        scores: Floats = np.abs(block @ self._alpha[index]) / np.sqrt(np.maximum(np.diag(block), 1e-12))
        return scores

    def _calibrate(self, groups: Ints, fallback: float) -> float:
        """Factor on the spread so that 90 % intervals hold 90 % of groups left out, exactly (conformal)."""
        if len(np.unique(groups)) < (4 if fallback == UNCALIBRATED else 2):
            return fallback
        scores = [self._scores(np.flatnonzero(groups == held)) for held in np.unique(groups)]
        return float(np.clip(np.quantile(np.concatenate(scores), COVERAGE) / _Z, *SCALE_LIMITS))

    def _calibrate_beyond(self, size_classes: Ints) -> float:
        """The same for sizes below or above all measured ones, from the lower and the upper third left out.

        Two ends are few, so what is found leans on what is usual.
        """
        known = np.unique(size_classes)
        usual = BEYOND * max(self._scale, 1.0)
        if len(known) < 4:
            return usual
        n_left_out = max(1, len(known) // 3)
        ends = (known[:n_left_out], known[-n_left_out:])
        scores = [self._scores(np.flatnonzero(np.isin(size_classes, end))) for end in ends]
        found = float(np.quantile(np.concatenate(scores), COVERAGE)) / _Z
        leaning = (len(known) * found + _BEYOND_WEIGHT * usual) / (len(known) + _BEYOND_WEIGHT)
        return float(np.clip(leaning, *SCALE_LIMITS))

    def _calibrate_unmeasured(self, owner: Ints) -> float:
        """The same for cells that were never measured, from each cell left out; few cells lean on what is usual."""
        n_cells = len(self._cells)
        usual = NEVER_MEASURED * max(self._scale, 1.0)
        if n_cells < 3:
            return usual
        scores = [self._scores(np.flatnonzero(owner == held)) for held in range(n_cells)]
        found = float(np.quantile(np.concatenate(scores), COVERAGE)) / _Z
        leaning = (n_cells * found + _NEVER_MEASURED_WEIGHT * usual) / (n_cells + _NEVER_MEASURED_WEIGHT)
        return float(np.clip(leaning, *SCALE_LIMITS))

    def _octaves_beyond(self, points: TrainingSet) -> Floats:
        """How far below the smallest or above the largest size measured of the same collective and cell; 0 between.

        Cells that were never measured are as far as the nearest cell.
        """
        asked, octaves = _bytes_per_rank(points), np.zeros(len(points))
        for kind in _kinds(points):
            lowest, highest = self._known_bytes.get(kind, self._all_bytes)
            here = _is_kind(points, kind)
            gaps = np.maximum(lowest - asked[here], asked[here] - highest)
            octaves[here] = np.maximum(gaps - _SAME_SIZE, 0.0)
        return octaves

    def _design(self, points: TrainingSet) -> Floats:
        few_nodes = (points.n_nodes <= 2).astype(np.float64)
        return np.column_stack([_numeric(points), few_nodes, _one_hot(points, self._cells)])


def _most_probable(objective: Any, start: Floats, bounds: Floats) -> tuple[Floats, float]:
    """Log hyperparameters of least `objective` (minus log likelihood, with gradient) and distance from `start`."""
    from scipy.optimize import minimize

    def penalised(theta: Floats) -> tuple[float, Floats]:
        value, gradient = objective(theta)
        return value + 0.5 * float(np.sum((theta - start) ** 2)), gradient + (theta - start)

    found = minimize(penalised, start, jac=True, method="L-BFGS-B", bounds=bounds)
    return found.x, float(found.fun)


MODELS: Final[dict[str, type[Any]]] = {model.name: model for model in (Uncorrected, Ridge, Neighbour, Forest, Kriging)}
WINNER: Final = Kriging.name


def _numeric(points: TrainingSet) -> Floats:
    """log2 of bytes per rank, channels, ranks, nodes: shape [n, 4]."""
    nodes = np.log2(np.maximum(points.n_nodes, 1))
    return np.column_stack([_bytes_per_rank(points), np.log2(points.n_channels), np.log2(points.n_ranks), nodes])


def _bytes_per_rank(points: TrainingSet) -> Floats:
    """log2 of the bytes per rank."""
    logs: Floats = points.log2_bytes - np.log2(points.n_ranks)
    return logs


def _kinds(points: TrainingSet) -> list[tuple[int, int, int]]:
    table = np.stack([points.collective, points.algorithm, points.protocol], axis=1)
    return [(int(a), int(b), int(c)) for a, b, c in np.unique(table, axis=0)]


def _is_kind(points: TrainingSet, kind: tuple[int, int, int]) -> Any:
    return (points.collective == kind[0]) & (points.algorithm == kind[1]) & (points.protocol == kind[2])


def _is_known(points: TrainingSet, kinds: list[tuple[int, int, int]]) -> Any:
    """Whether each point's collective and cell are among `kinds`."""
    found = np.zeros(len(points), dtype=np.bool_)
    for kind in kinds:
        found |= _is_kind(points, kind)
    return found


def _doubted(points: TrainingSet, kinds: list[tuple[int, int, int]], std: Floats) -> Floats:
    """`std`, but at least that of no knowledge where the cell was never measured."""
    result: Floats = np.where(_is_known(points, kinds), std, np.maximum(std, UNKNOWN_STD))
    return result


def _known_cells(points: TrainingSet) -> list[tuple[int, int, int]]:
    return _kinds(points)


def _one_hot(points: TrainingSet, kinds: list[tuple[int, int, int]]) -> Floats:
    """Flags for collective, algorithm, protocol and the whole kind, so that related kinds are near."""
    columns = [
        points.collective[:, None] == np.unique([kind[0] for kind in kinds])[None, :],
        points.algorithm[:, None] == np.unique([kind[1] for kind in kinds])[None, :],
        points.protocol[:, None] == np.unique([kind[2] for kind in kinds])[None, :],
    ]
    return np.concatenate(columns, axis=1).astype(np.float64)


def _sample(points: TrainingSet, n_points: int) -> Any:
    """Indices of at most `n_points` points, the same for the same points."""
    if len(points) <= n_points:
        return np.arange(len(points))
    return np.sort(np.random.default_rng(_SEED).choice(len(points), n_points, replace=False))


__all__ = ["DEFAULT_CELL", "MODELS", "WINNER", "Estimator"]
