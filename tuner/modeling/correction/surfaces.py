"""The kernel of kriging: a Matern surface with some learned and some given scales.

Imports scikit-learn, so only fits import this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist
from sklearn.gaussian_process.kernels import Hyperparameter, Kernel, NormalizedKernelMixin, StationaryKernelMixin

from ..features import Floats


class MaternKernel(StationaryKernelMixin, NormalizedKernelMixin, Kernel):  # type: ignore[misc]  # its bases have no types
    """A kernel for scikit-learn's regressor, hence a subclass of its untyped class.

    Its surfaces are once differentiable. The first columns of a point have learned length scales. The columns after
    these have `given_scale`, or do not count without one. Gradients by given scales would take most of a fit's time.
    """

    def __init__(
        self,
        length_scale: Sequence[float] | Floats,
        length_scale_bounds: Sequence[tuple[float, float]] | Floats,
        given_scale: float | None = None,
    ) -> None:
        self.length_scale = length_scale
        self.length_scale_bounds = length_scale_bounds
        self.given_scale = given_scale

    @property
    def hyperparameter_length_scale(self) -> Any:
        """The hyperparameter, under the name that scikit-learn expects."""
        return Hyperparameter("length_scale", "numeric", self.length_scale_bounds, len(self.length_scale))

    def __call__(self, X: Floats, Y: Floats | None = None, eval_gradient: bool = False) -> Any:
        """Covariances [len(X), len(Y)], Y = X if it is None; and their gradient by the logs of the learned scales."""
        scaled = self._scaled(X)
        distances = cdist(scaled, scaled if Y is None else self._scaled(Y))
        distances *= math.sqrt(3.0)
        decay = np.exp(-distances)
        if not eval_gradient:
            distances += 1.0
            distances *= decay
            return distances
        learned = scaled[:, : len(self.length_scale)].T
        gradient = np.square(learned[:, :, None] - learned[:, None, :])
        gradient *= 3.0 * decay
        return (1.0 + distances) * decay, np.moveaxis(gradient, 0, -1)

    def _scaled(self, points: Floats) -> Floats:
        n_learned = len(self.length_scale)
        scaled: Floats = points[:, :n_learned] / np.asarray(self.length_scale)
        if self.given_scale is not None:
            scaled = np.column_stack([scaled, points[:, n_learned:] / self.given_scale])
        return scaled
