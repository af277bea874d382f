"""The kernel that kriging is made of: a Matern surface, some of whose scales are learned and the others given.

Imports scikit-learn: to be imported by whoever fits, when it fits.
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

    Once differentiable; the first columns of a point have length scales to be learned.
    The columns after these have `given_scale`, or do not count without one. A gradient with respect to scales that
    nobody learns would be most of what a fit costs.
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
        """Under the name by which scikit-learn looks for it."""
        return Hyperparameter("length_scale", "numeric", self.length_scale_bounds, len(self.length_scale))

    def __call__(self, X: Floats, Y: Floats | None = None, eval_gradient: bool = False) -> Any:
        """Covariances [len(X), len(Y)], Y = X without one; with their gradient by the logs of the scales learned."""
        ours = self._scaled(X)
        distances = cdist(ours, ours if Y is None else self._scaled(Y))
        distances *= math.sqrt(3.0)
        decay = np.exp(-distances)
        if not eval_gradient:
            distances += 1.0
            distances *= decay
            return distances
        learned = ours[:, : len(self.length_scale)].T
        gradient = np.square(learned[:, :, None] - learned[:, None, :])
        gradient *= 3.0 * decay
        return (1.0 + distances) * decay, np.moveaxis(gradient, 0, -1)

    def _scaled(self, points: Floats) -> Floats:
        n_learned = len(self.length_scale)
        scaled: Floats = points[:, :n_learned] / np.asarray(self.length_scale)
        if self.given_scale is not None:
            scaled = np.column_stack([scaled, points[:, n_learned:] / self.given_scale])
        return scaled
