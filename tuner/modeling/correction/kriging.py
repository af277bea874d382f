"""The model that won: a Gaussian process on logs, and how much its spread is to be trusted where.

scikit-learn is imported inside `fit` only.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Final

import numpy as np

from zerotune.store.records import SIZE_CLASSES_PER_OCTAVE
from zerotune.tuner.modeling.correction.baked import DISBELIEF, FAR_STD
from zerotune.tuner.modeling.correction.columns import (
    SEED,
    Bools,
    communicator_codes,
    is_kind,
    is_known,
    kinds_of,
    log2_bytes_per_rank,
    numeric,
    one_hot,
)
from zerotune.tuner.modeling.correction.counts import octaves_to_measured, runs_as_asked
from zerotune.tuner.modeling.correction.training_set import TrainingSet
from zerotune.tuner.modeling.features import NO_CELL, Floats, Ints

COVERAGE: Final = 0.9
SCALE_LIMITS: Final = (0.2, 6.0)
UNCALIBRATED: Final = 1.5
"""Factor on the spread when there are too few sizes to hold any out."""
BEYOND: Final = 2.0
"""Factor on the spread beyond the measured sizes, before anything was held out; it weighs as much as six sizes."""
_BEYOND_WEIGHT: Final = 6.0
_Z: Final = 1.645
ELSEWHERE: Final = 2.0
"""Factor on the spread at rank counts that were never measured, before any were held out; it weighs as much as two."""
_ELSEWHERE_WEIGHT: Final = 2.0
NEVER_MEASURED: Final = 1.5
"""Factor on the spread of cells that were never measured, before any were held out; it weighs as much as four cells."""
_NEVER_MEASURED_WEIGHT: Final = 4.0
NEW_COUNT_STD: Final = 0.15
NEW_COUNT_OF_CELL_STD: Final = 0.05
"""Doubt (log) per square root of an octave from the nearest measured channel count, before any were held out: of a
count that nothing was measured with, and of one that its cell was not. They weigh as much as four counts, and ten.
"""
_NEW_COUNT_WEIGHT: Final = 4.0
_NEW_COUNT_OF_CELL_WEIGHT: Final = 10.0
_MOST_COUNT_STD: Final = 0.5
_SAME_SIZE: Final = 0.25
"""Two sizes within this many octaves are of one class."""


class Kriging:
    """A Gaussian process on logs: smooth in bytes, channels, ranks and nodes, one surface per cell.

    Two Matern terms: what all cells share, and what belongs to one cell; how much of the latter a collective has in
    common with the others is learned. So a cell that was never measured gets what all cells share and what it shows
    in other collectives. The surface of a cell may have several minima over channels. Where several communicators
    were measured, how much NCCL's cost jumps because there are few nodes is an input of its own. Length scales are the
    most probable ones on a sample of the points, given that they are usually near the starting values: a grid of eight
    sizes says little about them.

    Spreads are scaled so that 90 % intervals hold 90 % of what is left out: sizes, communicators, ends of the range of
    sizes, cells. Two doubts are *added*. One is for channel counts that were never measured: where the measured ones
    lie on a line, the process is nearly certain between them, and no factor on nearly nothing covers a bend. The
    other is for a jump on few nodes, or idle channels, that NCCL's cost has at the asked point and at no measured one.
    """

    name = "kriging"

    def fit(self, points: TrainingSet) -> Kriging:
        """Fit hyperparameters on a sample, then condition on every point."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel

        from zerotune.tuner.modeling.correction.surfaces import MaternKernel

        self._cells = kinds_of(points)
        self._compares_communicators = len(np.unique(communicator_codes(points))) > 1
        design = self.design(points)
        n_collectives = len(np.unique(points.collective))
        shared = ConstantKernel(0.5, (1e-3, 4.0)) * MaternKernel(
            [20.0, 4.0, 4.0, 4.0, 4.0], [(1.0, 60.0), (0.7, 40.0), (0.5, 60.0), (0.5, 60.0), (0.4, 100.0)]
        )
        own = ConstantKernel(0.2, (1e-3, 4.0)) * MaternKernel(
            [8.0, 2.0, 3.0, 3.0, 4.0, *[1.5] * n_collectives],
            [(1.0, 30.0), (0.4, 20.0), (0.5, 40.0), (0.5, 40.0), (0.4, 100.0), *[(0.4, 20.0)] * n_collectives],
            given_scale=0.4,
        )
        kernel: Any = shared + own + WhiteKernel(1e-3, (1e-6, 0.5))
        sample = _sample(points, 220)
        tuned = GaussianProcessRegressor(
            kernel, alpha=points.noise[sample] ** 2, optimizer=_most_probable, random_state=SEED
        )
        with warnings.catch_warnings():
            # Scales that nothing speaks for or against end at their bounds, as they may.
            warnings.simplefilter("ignore", ConvergenceWarning)
            tuned.fit(design[sample], points.residual[sample])
        self.process = GaussianProcessRegressor(tuned.kernel_, alpha=points.noise**2, optimizer=None)
        """Of the residuals, over `design`."""
        self.process.fit(design, points.residual)
        inverse = np.linalg.inv(self.process.L_)
        self._precision, self._alpha = inverse.T @ inverse, np.asarray(self.process.alpha_).reshape(-1)
        self._quirks = self._precision @ _quirks(points)
        all_known, owner = log2_bytes_per_rank(points), np.zeros(len(points), dtype=np.int64)
        self._known_bytes, self._all_bytes = {}, (float(all_known.min()), float(all_known.max()))
        for at, kind in enumerate(self._cells):
            here = is_kind(points, kind)
            owner[here] = at
            self._known_bytes[kind] = float(all_known[here].min()), float(all_known[here].max())
        self._scale = self._calibrate(points.size_class, UNCALIBRATED)
        self._scale_elsewhere = max(self._scale, self._calibrate_elsewhere(points))
        self._scale_beyond = max(self._scale, self._calibrate_beyond(points))
        self._scale_unmeasured = max(self._scale, self._calibrate_unmeasured(owner))
        self._points = points
        self._new_count_std, self._new_count_of_cell_std = self._calibrate_counts(points, owner)
        return self

    def predict(self, points: TrainingSet) -> tuple[Floats, Floats]:
        """Posterior mean and calibrated spread."""
        design, quirks = self.design(points), _quirks(points)
        mean, std, disbelief = np.zeros((3, len(points)))
        for start in range(0, len(design), 8192):
            part = slice(start, start + 8192)
            mean[part], std[part], disbelief[part] = self._ask(design[part], quirks[part])
        is_elsewhere = ~np.isin(communicator_codes(points), communicator_codes(self._points))
        scale = np.where(is_elsewhere, self._scale_elsewhere, self._scale)
        octaves = self._octaves_beyond(points)
        scale = np.where(octaves > 0, np.maximum(scale, self._scale_beyond), scale)
        scale = np.where(is_known(points, self._cells), scale, np.maximum(scale, self._scale_unmeasured))
        parts = std * scale, FAR_STD * octaves, self._doubt_of_counts(points), disbelief
        spread = np.sqrt(np.sum(np.square(parts), axis=0))
        return mean, np.maximum(spread, 0.003)

    def _ask(self, design: Floats, quirks: Floats) -> tuple[Floats, Floats, Floats]:
        """Mean and spread of the process, and the doubt about what is peculiar to the cost where it is asked."""
        from scipy.linalg import solve_triangular

        kernel = self.process.kernel_
        shared = kernel(design, self.process.X_train_)
        explained = solve_triangular(self.process.L_, shared.T, lower=True, check_finite=False)
        variance = kernel.diag(design) - np.einsum("ij,ij->j", explained, explained)
        peculiar = quirks - shared @ self._quirks
        return shared @ self._alpha, np.sqrt(np.maximum(variance, 0.0)), DISBELIEF * np.linalg.norm(peculiar, axis=1)

    def left_out(self, index: Ints) -> Floats:
        """Measured minus predicted residual of the points at `index`, had none of them been known: exact."""
        return self._without(index)[0]

    def _without(self, index: Ints) -> tuple[Floats, Floats, Floats]:
        """`left_out`, the spread that the process would have had, and the doubt about what is peculiar to the cost."""
        block = np.linalg.inv(self._precision[np.ix_(index, index)])
        errors: Floats = block @ self._alpha[index]
        peculiar = block @ self._quirks[index]
        spread = np.sqrt(np.maximum(np.diag(block), 1e-12))
        return errors, spread, DISBELIEF * np.linalg.norm(peculiar, axis=1)

    def _scores(self, held: Bools, added: Floats | float = 0.0) -> Floats:
        """What the process's spread must be multiplied by for 90 % intervals to hold each of the points left out.

        `added` is the doubt (log) that is added to it anyway.
        """
        errors, spread, disbelief = self._without(np.flatnonzero(held))
        missing = (errors / _Z) ** 2 - disbelief**2 - np.square(added)
        scores: Floats = np.sqrt(np.maximum(missing, 0.0)) / spread
        return scores

    def _calibrate(self, groups: Ints, fallback: float) -> float:
        """Factor on the spread so that 90 % intervals hold 90 % of groups left out, exactly (conformal)."""
        if len(np.unique(groups)) < 4:
            return fallback
        scores = [self._scores(groups == held) for held in np.unique(groups)]
        return float(np.clip(np.quantile(np.concatenate(scores), COVERAGE), *SCALE_LIMITS))

    def _calibrate_elsewhere(self, points: TrainingSet) -> float:
        """Factor on the spread at communicators that were never measured, from leaving each one out.

        With few of them it stays near the usual factor.
        """
        communicators = communicator_codes(points)
        usual = ELSEWHERE * self._scale
        if len(np.unique(communicators)) < 2:
            return usual
        scores = [self._scores(communicators == held) for held in np.unique(communicators)]
        return _leaning(np.concatenate(scores), len(scores), usual, _ELSEWHERE_WEIGHT)

    def _calibrate_beyond(self, points: TrainingSet) -> float:
        """Factor on the spread below or above all measured sizes, from leaving out the lower and the upper third.

        Two ends are few, so the result stays near the usual factor.
        """
        classes = points.size_class
        known = np.unique(classes)
        usual = BEYOND * max(self._scale, 1.0)
        if len(known) < 4:
            return usual
        n_left_out = max(1, len(known) // 3)
        scores = []
        for end, last in ((known[:n_left_out], known[n_left_out]), (known[-n_left_out:], known[-n_left_out - 1])):
            held = np.isin(classes, end)
            octaves = np.abs(classes[held] - last) / SIZE_CLASSES_PER_OCTAVE
            scores.append(self._scores(held, FAR_STD * octaves))
        return _leaning(np.concatenate(scores), len(known), usual, _BEYOND_WEIGHT)

    def _calibrate_unmeasured(self, owner: Ints) -> float:
        """Factor on the spread of cells that were never measured, from leaving each one out.

        With few of them it stays near the usual factor.
        """
        n_cells = len(self._cells)
        usual = NEVER_MEASURED * max(self._scale, 1.0)
        if n_cells < 3:
            return usual
        scores = [self._scores(owner == held) for held in range(n_cells)]
        return _leaning(np.concatenate(scores), n_cells, usual, _NEVER_MEASURED_WEIGHT)

    def _calibrate_counts(self, points: TrainingSet, owner: Ints) -> tuple[float, float]:
        """Doubt per square root of an octave: of counts that were never measured, and of those new to their cell.

        From leaving out each count, of all cells and of one, where NCCL ran as many as were asked for.
        """
        judged = runs_as_asked(points)
        anywhere, of_cell = [], []
        for count in np.unique(points.n_channels[judged]):
            here = judged & (points.n_channels == count)
            anywhere.append(self._misses(points, here, ~(points.n_channels == count) & (points.algorithm != NO_CELL)))
            for kind in np.unique(owner[here]):
                of_kind = owner == kind
                of_cell.append(self._misses(points, here & of_kind, of_kind & (points.n_channels != count)))
        return (
            self._roughness(anywhere, NEW_COUNT_STD, _NEW_COUNT_WEIGHT),
            self._roughness(of_cell, NEW_COUNT_OF_CELL_STD, _NEW_COUNT_OF_CELL_WEIGHT),
        )

    def _misses(self, points: TrainingSet, held: Bools, others: Bools) -> Floats:
        """Of the points `held` left out: variance that their spread lacks, octaves to the nearest count of `others`."""
        index = np.flatnonzero(held)
        errors, spread, disbelief = self._without(index)
        octaves = octaves_to_measured(points.take(index), points.take(others))
        missing = (errors / _Z) ** 2 - (self._scale * spread) ** 2 - disbelief**2
        return np.column_stack([missing, octaves])[np.isfinite(octaves)]

    def _roughness(self, left_out: list[Floats], usual: float, weight: float) -> float:
        """What must be added, per square root of an octave, for 90 % intervals to hold 90 % of what was left out."""
        left_out = [one for one in left_out if len(one)]
        if not left_out:
            return usual
        missing, octaves = np.concatenate(left_out).T
        found = math.sqrt(max(0.0, float(np.quantile(missing / np.maximum(octaves, 0.1), COVERAGE))))
        leaning = (len(left_out) * found + weight * usual) / (len(left_out) + weight)
        return min(leaning, _MOST_COUNT_STD)

    def _doubt_of_counts(self, points: TrainingSet) -> Floats:
        """What is added to the spread of channel counts that were not measured at about the same size."""
        doubt = np.zeros(len(points))
        anything = self._points.take(self._points.algorithm != NO_CELL)
        for kind in kinds_of(points):
            if kind[1] == NO_CELL:
                continue
            here = np.flatnonzero(is_kind(points, kind))
            asked = points.take(here)
            of_cell = octaves_to_measured(asked, self._points.take(is_kind(self._points, kind)))
            anywhere = np.minimum(of_cell, octaves_to_measured(asked, anything))
            is_near = np.isfinite(of_cell)  # where the cell was not measured at all, other doubts are greater
            variance = self._new_count_std**2 * anywhere[is_near] + self._new_count_of_cell_std**2 * of_cell[is_near]
            doubt[here[is_near]] = np.sqrt(variance)
        return doubt

    def _octaves_beyond(self, points: TrainingSet) -> Floats:
        """How far below the smallest or above the largest size measured of the same collective and cell; 0 between.

        Cells that were never measured are as far as the nearest cell.
        """
        asked, octaves = log2_bytes_per_rank(points), np.zeros(len(points))
        for kind in kinds_of(points):
            lowest, highest = self._known_bytes.get(kind, self._all_bytes)
            here = is_kind(points, kind)
            gaps = np.maximum(lowest - asked[here], asked[here] - highest)
            octaves[here] = np.maximum(gaps - _SAME_SIZE, 0.0)
        return octaves

    def design(self, points: TrainingSet) -> Floats:
        """What the process is told of `points`, shape [n_points, n_features]."""
        jump = points.jump if self._compares_communicators else np.zeros(len(points))
        return np.column_stack([numeric(points), jump, one_hot(points, self._cells)])


def _quirks(points: TrainingSet) -> Floats:
    """Peculiarities of NCCL's cost that a machine need not follow (jump on few nodes, idle channels): [n, 2]."""
    return np.column_stack([points.jump, points.idle])


def _leaning(scores: Floats, n_groups: int, usual: float, weight: float) -> float:
    """Factor that covers 90 % of `scores`, with the usual factor counting as `weight` more groups."""
    found = float(np.quantile(scores, COVERAGE))
    return float(np.clip((n_groups * found + weight * usual) / (n_groups + weight), *SCALE_LIMITS))


def _most_probable(objective: Any, start: Floats, bounds: Floats) -> tuple[Floats, float]:
    """Log hyperparameters of least `objective` (minus log likelihood, with gradient) and distance from `start`."""
    from scipy.optimize import minimize

    def penalised(theta: Floats) -> tuple[float, Floats]:
        value, gradient = objective(theta)
        return value + 0.5 * float(np.sum((theta - start) ** 2)), gradient + (theta - start)

    found = minimize(penalised, start, jac=True, method="L-BFGS-B", bounds=bounds)
    return found.x, float(found.fun)


def _sample(points: TrainingSet, n_points: int) -> Any:
    """Indices of at most `n_points` points, the same for the same points."""
    if len(points) <= n_points:
        return np.arange(len(points))
    return np.sort(np.random.default_rng(SEED).choice(len(points), n_points, replace=False))
