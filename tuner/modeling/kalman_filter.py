"""A Kalman filter that estimates quantities from noisy weighted sums: the numerics of online regressions."""

from __future__ import annotations

import math

import numpy as np


class KalmanFilter:
    """Means and covariance of quantities, in the order in which they were added; independent at first."""

    def __init__(self) -> None:
        self.mean = np.zeros(0)
        self.covariance = np.zeros((0, 0))

    def add(self, *variances: float) -> int:
        """Add quantities of mean 0 and these variances; return the index of the first."""
        place = len(self.mean)
        self.mean = np.append(self.mean, np.zeros(len(variances)))
        grown = np.diag([*np.zeros(place), *variances])
        grown[:place, :place] = self.covariance
        self.covariance = grown
        return place

    def expected(self, design: np.ndarray) -> tuple[float, float]:
        """Mean and variance of `design @ quantities`."""
        return float(design @ self.mean), max(0.0, float(design @ self.covariance @ design))

    def observe(self, design: np.ndarray, value: float, noise: float, *, clip: float = math.inf) -> tuple[float, float]:
        """Take in an observation: `design @ quantities` was `value`, with standard deviation `noise`.

        The value is clipped to `clip` standard deviations from the expected one. Returns its difference from the
        expected one, and the variance of that.
        """
        along = self.covariance @ design
        variance = float(design @ along) + noise**2
        limit = clip * math.sqrt(variance)
        surprise = min(max(value - float(design @ self.mean), -limit), limit)
        self.mean += along * (surprise / variance)
        self.covariance -= np.outer(along, along) / variance
        return surprise, variance
