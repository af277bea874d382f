"""The correction: a Gaussian process on logs with calibrated standard deviations.

scikit-learn is imported inside `fit` only.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..features import NO_CELL, Floats, Ints
from .baked import DISBELIEF
from .columns import SEED, communicator_codes, kind_codes, kinds_of, numeric, one_hot
from .distance import octaves_to_nearest
from .training_set import TrainingSet

COVERAGE: Final = 0.9
SCALE_LIMITS: Final = (0.2, 6.0)
UNCALIBRATED: Final = 1.5
"""Factor on the standard deviation if there are too few sizes to leave any out."""
USUAL_DOUBT_STD: Final = 0.2
"""Prior doubt (log) per square root of an octave to the nearest measurement. Its weight is that of `_USUAL_WEIGHT`
groups.
"""
_USUAL_WEIGHT: Final = 8.0
_MOST_DOUBT_STD: Final = 0.5
_Z: Final = 1.645


class Kriging:
    """A Gaussian process on logs: smooth in bytes, channels, ranks and nodes, one surface per cell.

    There are two Matern terms: one for all cells, and one for each cell. The fit learns which share of a cell's term
    all collectives have. So an unmeasured cell gets the common term and its term in other collectives. The surface of
    a cell may have several minima over channels. If several communicators were measured, the jump of NCCL's cost on
    few nodes is an input, too. Length scales are the most probable ones on a sample of the points, with a prior around
    the starting values: a grid of eight sizes says little about them.

    The standard deviation is scaled so that 90 % intervals hold 90 % of the sizes left out. Two doubts are *added*. One
    grows with the distance from measurements (`octaves_to_nearest`): if measured channel counts lie on a line, the
    process is nearly certain between them, and a factor on nearly zero covers no bend. The other covers a jump on few
    nodes, or idle channels, that NCCL's cost has at the asked point and at no measured one.
    """

    def fit(self, points: TrainingSet) -> Kriging:
        """Fit hyperparameters on a sample, then condition on every point."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel

        from .surfaces import MaternKernel

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
            # Scales without evidence end at their bounds, which is no fault.
            warnings.simplefilter("ignore", ConvergenceWarning)
            tuned.fit(design[sample], points.residual[sample])
        self.process = GaussianProcessRegressor(tuned.kernel_, alpha=points.noise**2, optimizer=None)
        """The process of the residuals over `design`."""
        self.process.fit(design, points.residual)
        inverse = np.linalg.inv(self.process.L_)
        self._precision, self._alpha = inverse.T @ inverse, np.asarray(self.process.alpha_).reshape(-1)
        self._quirks = self._precision @ _quirks(points)
        self._points = points
        self._scale = self._calibrated_scale(points.size_class)
        self._doubt_std = self._calibrated_doubt()
        return self

    def predict(self, points: TrainingSet) -> tuple[Floats, Floats]:
        """Posterior mean and calibrated standard deviation."""
        design, quirks = self.design(points), _quirks(points)
        mean, std, disbelief, octaves = np.zeros((4, len(points)))
        for start in range(0, len(design), 4096):
            part = slice(start, start + 4096)
            mean[part], std[part], disbelief[part] = self._ask(design[part], quirks[part])
            octaves[part] = octaves_to_nearest(points.take(np.arange(len(points))[part]), self._points)
        spread = np.sqrt((std * self._scale) ** 2 + disbelief**2 + self._doubt_std**2 * octaves)
        return mean, np.maximum(spread, 0.003)

    def _ask(self, design: Floats, quirks: Floats) -> tuple[Floats, Floats, Floats]:
        """Mean and standard deviation of the process, and the doubt about peculiarities of NCCL's cost."""
        from scipy.linalg import solve_triangular

        kernel = self.process.kernel_
        shared = kernel(design, self.process.X_train_)
        explained = solve_triangular(self.process.L_, shared.T, lower=True, check_finite=False)
        variance = kernel.diag(design) - np.einsum("ij,ij->j", explained, explained)
        peculiar = quirks - shared @ self._quirks
        return shared @ self._alpha, np.sqrt(np.maximum(variance, 0.0)), DISBELIEF * np.linalg.norm(peculiar, axis=1)

    def left_out(self, index: Ints) -> Floats:
        """Measured minus predicted residual of the points at `index`, predicted without them (exactly)."""
        return self._without(index)[0]

    def _without(self, index: Ints) -> tuple[Floats, Floats, Floats]:
        """`left_out`, the process's standard deviation without the points, and the doubt about NCCL's peculiarities."""
        block = np.linalg.inv(self._precision[np.ix_(index, index)])
        errors: Floats = block @ self._alpha[index]
        peculiar = block @ self._quirks[index]
        spread = np.sqrt(np.maximum(np.diag(block), 1e-12))
        return errors, spread, DISBELIEF * np.linalg.norm(peculiar, axis=1)

    def _calibrated_scale(self, groups: Ints) -> float:
        """Factor on the standard deviation so that 90 % intervals hold 90 % of groups left out, exactly (conformal)."""
        if len(np.unique(groups)) < 4:
            return UNCALIBRATED
        scores = []
        for held in np.unique(groups):
            errors, spread, disbelief = self._without(np.flatnonzero(groups == held))
            scores.append(np.sqrt(np.maximum((errors / _Z) ** 2 - disbelief**2, 0.0)) / spread)
        return float(np.clip(np.quantile(np.concatenate(scores), COVERAGE), *SCALE_LIMITS))

    def _calibrated_doubt(self) -> float:
        """Doubt to add per square root of an octave so that 90 % intervals hold 90 % of `_groups` left out."""
        points, missing = self._points, []
        for is_left_out in _groups(points):
            index = np.flatnonzero(is_left_out)
            errors, spread, disbelief = self._without(index)
            octaves = octaves_to_nearest(points.take(index), points.take(~is_left_out))
            lacks = (errors / _Z) ** 2 - (self._scale * spread) ** 2 - disbelief**2
            if (octaves > 0).any():
                missing.append((lacks / np.maximum(octaves, 0.1))[octaves > 0])
        if not missing:
            return USUAL_DOUBT_STD
        found = math.sqrt(max(0.0, float(np.quantile(np.concatenate(missing), COVERAGE))))
        leaning = (len(missing) * found + _USUAL_WEIGHT * USUAL_DOUBT_STD) / (len(missing) + _USUAL_WEIGHT)
        return min(leaning, _MOST_DOUBT_STD)

    def design(self, points: TrainingSet) -> Floats:
        """The process's inputs at `points`, shape [n_points, n_features]."""
        jump = points.jump if self._compares_communicators else np.zeros(len(points))
        return np.column_stack([numeric(points), jump, one_hot(points, self._cells)])


def _groups(points: TrainingSet) -> Iterator[npt.NDArray[np.bool_]]:
    """Groups of points to leave out: lower and upper third of sizes of each communicator, kind and channel count."""
    classes = np.unique(points.size_class)
    n_ends = max(1, len(classes) // 3)
    is_named = points.algorithm != NO_CELL
    groups = [np.isin(points.size_class, classes[:n_ends]), np.isin(points.size_class, classes[-n_ends:])]
    groups += [is_named & (points.n_channels == count) for count in np.unique(points.n_channels[is_named])]
    for codes in (communicator_codes(points), kind_codes(points)):
        groups += [codes == code for code in np.unique(codes)]
    return (group for group in groups if not group.all())


def _quirks(points: TrainingSet) -> Floats:
    """Peculiarities of NCCL's cost that a machine need not follow (jump on few nodes, idle channels): [n, 2]."""
    return np.column_stack([points.jump, points.idle])


def _most_probable(objective: Any, start: Floats, bounds: Floats) -> tuple[Floats, float]:
    """Log hyperparameters with the least sum of `objective` (minus log likelihood, with gradient) and prior."""
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
