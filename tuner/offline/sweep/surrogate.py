"""A sweep's expectations of every point of one collective, given the few measured ones.

The posterior is the policy's (tuner/modeling/posterior.py). A sweep has all samples of one quiet machine. So it fits
one scale to them: the general error of guesses on this machine.

Everything is a pure function of the measurements, so a resumed sweep gets the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ....store.records import BASELINE, Candidate, CommunicatorClass, Outcome, size_class
from ...modeling.correction.baked import UNKNOWN_STD, Correction
from ...modeling.cost_prior import CostPrior
from ...modeling.features import Floats, cell_of
from ...modeling.posterior import Column, Known, fitted_scale, joint
from .grid import GridPoint, Place

COMMON_STD: Final = 2.0
"""Common error (log) of all guesses, which causes no doubt about a choice."""
UNKNOWN_US: Final = 150.0
"""Guess if nothing is known of any point."""
USUAL_NOISE: Final = 0.04
"""Assumed standard deviation of one sample's log while there are few samples."""
LEAST_NOISE: Final = 0.002
USUAL_WEIGHT: Final = 4
"""The usual noise counts as this many degrees of freedom."""
MIN_FREE: Final = 6
"""With fewer degrees of freedom, samples alone give no estimate."""
FAR_DEVIATIONS: Final = 4.0
MIN_FIT_POINTS: Final = 6
MEDIAN_EFFICIENCY: Final = math.pi / 2
"""Variance of a median over that of a mean, of more than two samples."""
_MAD_TO_SIGMA: Final = 1.3 * 1.4826
"""1.4826 for a normal distribution, times 1.3 since the median of few samples lies close to them."""


class Expected(NamedTuple):
    """Log microseconds of the points of one place: mean (n,) and covariance (n, n)."""

    mean: Floats
    covariance: Floats


class Surrogate:
    """The points of one collective."""

    def __init__(
        self,
        points: Sequence[GridPoint],
        communicator: CommunicatorClass,
        costs: CostPrior,
        correction: Correction | None,
    ) -> None:
        self._points, self._communicator, self._costs = list(points), communicator, costs
        self._at: dict[Place, list[int]] = {}
        for index, point in enumerate(points):
            self._at.setdefault(point.place, []).append(index)
        self._table = np.zeros((len(points), len(Column)))
        for number, (place, indices) in enumerate(self._at.items()):
            where = communicator, place.collective, [self._shown(self._points[index]) for index in indices]
            nbytes, has_model = np.array([float(place.message_bytes)]), correction is not None
            here = np.zeros((len(indices), len(Column)))
            here[:, Column.guess] = costs.log_cost(*where, nbytes, described_only=has_model)[0]
            here[:, Column.std] = UNKNOWN_STD
            here[:, Column.transfer_share] = np.nan_to_num(costs.transfer_share(*where, nbytes)[0], nan=1.0)
            here[:, Column.log2_bytes], here[:, Column.key] = math.log2(place.message_bytes), number
            if correction is not None:
                shift, std = correction.predict(*where, np.array([size_class(place.message_bytes)]))
                here[:, Column.guess] += shift[0]
                here[:, Column.std] = std[0]
            self._table[indices] = here
        guess = self._table[:, Column.guess]
        known = np.isfinite(guess)
        guess[~known] = guess[known].mean() if known.any() else math.log(UNKNOWN_US)

    def expected(self) -> dict[Place, Expected]:
        """Expectations of every place, given all samples so far."""
        self._show()
        measured = [at for at, point in enumerate(self._points) if point.duration_us and point.outcome is Outcome.ok]
        points = [self._points[at] for at in measured]
        counts = np.array([len(point.duration_us) for point in points])
        variance = np.where(counts > 2, MEDIAN_EFFICIENCY, 1.0) * sample_noise(points) ** 2 / np.maximum(counts, 1)
        residual = np.array([math.log(point.median_us) for point in points]) - self._table[measured, Column.guess]
        known = Known(self._table[measured], np.zeros(len(points), np.int64), residual, variance)
        table = self._table
        if len(points) >= MIN_FIT_POINTS:
            table = table.copy()
            table[:, Column.std] *= fitted_scale(known, COMMON_STD)
            known = known._replace(rows=table[measured])
        found = joint([table[indices] for indices in self._at.values()], known, COMMON_STD)
        return {place: Expected(*one) for place, one in zip(self._at, found, strict=True)}

    def _show(self) -> None:
        """Update the settings that points are known to run."""
        n_available = self._costs.max_channels(self._communicator)
        settings = [self._shown(point) for point in self._points]
        channels = np.log2([max(1, setting.n_channels or n_available) for setting in settings])
        self._table[:, [Column.algorithm, Column.protocol]] = [cell_of(setting) for setting in settings]
        self._table[:, Column.log2_channels] = channels
        self._table[:, Column.octaves_fewer] = np.maximum(0.0, math.log2(n_available) - channels)

    def _shown(self, point: GridPoint) -> Candidate:
        """The point's setting: for the baseline, the one that ran, or else NCCL's expected choice."""
        if point.candidate != BASELINE:
            return point.candidate
        default = self._costs.default(self._communicator, point.place.collective, point.place.message_bytes)
        return point.ran or default or BASELINE


def sample_noise(points: Sequence[GridPoint]) -> float:
    """Standard deviation of one sample's log: USUAL_NOISE and the samples' own, weighted by degrees of freedom."""
    squares, n_free = _pooled_squares(points)
    return max(LEAST_NOISE, math.sqrt((squares + USUAL_WEIGHT * USUAL_NOISE**2) / (n_free + USUAL_WEIGHT)))


def noise_freedom(points: Sequence[GridPoint]) -> int:
    """Degrees of freedom of the samples' own noise; `sample_noise` adds USUAL_WEIGHT."""
    return _pooled_squares(points)[1]


def known_noise(points: Sequence[GridPoint]) -> float | None:
    """Standard deviation of one sample's log, pooled over `points`, robust against outliers; None: too few samples."""
    squares, n_free = _pooled_squares(points)
    return max(LEAST_NOISE, math.sqrt(squares / n_free)) if n_free >= MIN_FREE else None


def _pooled_squares(points: Sequence[GridPoint]) -> tuple[float, int]:
    """(sum of squared deviations of the samples' logs from their point's median, degrees of freedom).

    Points with a deviation far beyond the others' (by their median, which outliers do not move) are left out. Squares
    of few samples are nearly twice as efficient as the median.
    """
    found = [
        np.abs(np.log(point.duration_us) - math.log(point.median_us)) for point in points if len(point.duration_us) > 1
    ]
    # The median of an odd number of samples is one of them, whose deviation of 0 shows nothing.
    nonzero = [one for deviations in found for one in deviations.tolist() if one > 0]
    limit = FAR_DEVIATIONS * _MAD_TO_SIGMA * float(np.median(nonzero)) if nonzero else math.inf
    kept = [deviations for deviations in found if deviations.max() <= limit]
    return sum(float(np.sum(one**2)) for one in kept), sum(len(one) - 1 for one in kept)
