"""An opinion about every point of one collective from the few that were measured.

The log duration of a point is NCCL's cost, corrected by what earlier jobs taught, plus an error that is a sum
of Gaussian processes: one that all settings of a size share (the network is slower than believed), one per
algorithm and protocol that is the same at every size (LL128 is worse here), one that changes smoothly with
size and channel count, and one that belongs to a single point. How large the last two are is fitted to the
measurements by marginal likelihood, so that a smooth machine needs few of them and a rugged one gets more.
The first two keep wide fixed spreads: a setting that was never tried is never treated as known.

The opinion is a pure function of the measurements: a resumed sweep gets the same one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zerotune.store.records import Outcome
from zerotune.tuner.modeling.features import Floats, Ints
from zerotune.tuner.modeling.matern import matern
from zerotune.tuner.offline.sweep.grid import GridPoint, Place

SHARED_STD: Final = 2.0
SHARED_OCTAVES: Final = 6.0
KIND_STD: Final = 0.6
"""Spread (log) of one algorithm and protocol against the others, before it was ever measured."""
CHANNEL_OCTAVES: Final = 1.5
USUAL_NOISE: Final = 0.04
"""Standard deviation of one sample's log that is assumed while there are few samples."""
LEAST_NOISE: Final = 0.002
USUAL_WEIGHT: Final = 4
"""The usual noise counts as this many degrees of freedom."""
MIN_FREE: Final = 6
"""Degrees of freedom below which the samples alone give no estimate."""
FAR_DEVIATIONS: Final = 4.0
MIN_FIT_POINTS: Final = 6
MEDIAN_EFFICIENCY: Final = math.pi / 2
"""Variance of a median over that of a mean, of more than two samples."""
_MAD_TO_SIGMA: Final = 1.3 * 1.4826
"""1.4826 for a normal distribution, and 1.3 since the median of few samples lies close to them."""


class Hyperparameters(NamedTuple):
    """What is fitted: spread and reach of the smooth part, spread of each point's own part."""

    smooth_std: float
    octaves: float
    own_std: float


USUAL: Final = Hyperparameters(0.4, 3.0, 0.03)
SHAPES: Final = tuple(
    Hyperparameters(*one) for one in itertools.product((0.05, 0.15, 0.4, 1.0), (1.5, 3.0, 6.0), (0.005, 0.03, 0.1))
)


@dataclass(frozen=True)
class Opinion:
    """Log microseconds of the points of one place: mean (n,) and covariance (n, n)."""

    mean: Floats
    covariance: Floats


class Surrogate:
    """The points of one collective. `prior` is the log of the cost of each point (us), NaN: unknown."""

    def __init__(self, points: Sequence[GridPoint], prior: Floats, settings: Sequence[tuple[int, int, int]]) -> None:
        """`settings` are (algorithm, protocol, channels) as they run; equal ones of a place are one setting."""
        self._points = list(points)
        self._prior = np.where(np.isfinite(prior), prior, np.nanmean(prior) if np.isfinite(prior).any() else 5.0)
        self._log2_bytes = np.array([math.log2(point.place.message_bytes) for point in points])
        self._at: dict[Place, list[int]] = {}
        for index, point in enumerate(points):
            self._at.setdefault(point.place, []).append(index)
        self._place = np.array([list(self._at).index(point.place) for point in points])
        self.show(settings)

    def show(self, settings: Sequence[tuple[int, int, int]]) -> None:
        """What each point is now known to run."""
        self._kind = np.array([(algorithm << 8) | protocol for algorithm, protocol, _ in settings])
        self._log2_channels = np.array([math.log2(max(1, n_channels)) for *_, n_channels in settings])

    def opinions(self) -> dict[Place, Opinion]:
        """The opinion of every place, given all samples so far."""
        measured = np.array([i for i, point in enumerate(self._points) if _is_usable(point)], np.int64)
        mean, shape = self._prior, USUAL
        whitened = np.zeros((0, len(self._points)))
        if len(measured):
            medians = np.array([math.log(self._points[i].median_us) for i in measured])
            noise = sample_noise([self._points[i] for i in measured])
            counts = np.array([len(self._points[i].duration_us) for i in measured])
            variance = np.where(counts > 2, MEDIAN_EFFICIENCY, 1.0) * noise**2 / counts
            residual = medians - self._prior[measured]
            shape, lower = self._fitted(measured, residual, variance)
            shared = self._parts(measured, np.arange(len(self._points)), shape.octaves).covariance(shape)
            whitened = _solve(lower, shared)
            mean = mean + whitened.T @ _solve(lower, residual)
        found = {}
        for place, indices in self._at.items():
            here = np.array(indices)
            prior = self._parts(here, here, shape.octaves).covariance(shape)
            found[place] = Opinion(mean[here], prior - whitened[:, here].T @ whitened[:, here])
        return found

    def _fitted(self, measured: Ints, residual: Floats, variance: Floats) -> tuple[Hyperparameters, Floats]:
        """The likeliest shape, and the Cholesky factor of the measurements' covariance under it."""
        shapes = SHAPES if len(measured) >= MIN_FIT_POINTS else (USUAL,)
        parts = {octaves: self._parts(measured, measured, octaves) for octaves in {shape.octaves for shape in shapes}}
        best: tuple[float, Hyperparameters, Floats] | None = None
        for shape in shapes:
            inner = parts[shape.octaves].covariance(shape)
            inner[np.diag_indices_from(inner)] += variance + 1e-9
            lower: Floats = np.asarray(np.linalg.cholesky(inner), np.float64)
            likelihood = -0.5 * float(np.sum(_solve(lower, residual) ** 2)) - float(np.sum(np.log(np.diag(lower))))
            if best is None or likelihood > best[0]:
                best = (likelihood, shape, lower)
        assert best is not None
        return best[1], best[2]

    def _parts(self, first: Ints, second: Ints, reach_octaves: float) -> _Parts:
        octaves = np.abs(np.subtract.outer(self._log2_bytes[first], self._log2_bytes[second]))
        beside = np.abs(np.subtract.outer(self._log2_channels[first], self._log2_channels[second]))
        same_kind = np.equal.outer(self._kind[first], self._kind[second])
        same_place = np.equal.outer(self._place[first], self._place[second])
        return _Parts(
            fixed=SHARED_STD**2 * matern(octaves / SHARED_OCTAVES) + KIND_STD**2 * same_kind,
            smooth=same_kind * matern(octaves / reach_octaves) * matern(beside / CHANNEL_OCTAVES),
            own=same_kind & same_place & (beside == 0),
        )


class _Parts(NamedTuple):
    """Of a covariance (n, m), apart from the spreads that are fitted."""

    fixed: Floats
    smooth: Floats
    own: npt.NDArray[np.bool_]

    def covariance(self, shape: Hyperparameters) -> Floats:
        result: Floats = self.fixed + shape.smooth_std**2 * self.smooth + shape.own_std**2 * self.own
        return result


def _solve(lower: Floats, right: Floats) -> Floats:
    """`lower` (triangular) to the power of -1, times `right`."""
    from scipy.linalg import solve_triangular  # late: commands that sweep nothing do without

    solved: Floats = solve_triangular(lower, right, lower=True, check_finite=False)
    return solved


def sample_noise(points: Sequence[GridPoint]) -> float:
    """Standard deviation of one sample's log: USUAL_NOISE and the samples' own, weighed by degrees of freedom."""
    squares, n_free = _pooled_squares(points)
    return max(LEAST_NOISE, math.sqrt((squares + USUAL_WEIGHT * USUAL_NOISE**2) / (n_free + USUAL_WEIGHT)))


def noise_freedom(points: Sequence[GridPoint]) -> int:
    """Degrees of freedom with which samples tell their own noise; `sample_noise` adds USUAL_WEIGHT."""
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
    # The median of an odd number lies on one of them, which tells nothing.
    told = [one for deviations in found for one in deviations.tolist() if one > 0]
    limit = FAR_DEVIATIONS * _MAD_TO_SIGMA * float(np.median(told)) if told else math.inf
    kept = [deviations for deviations in found if deviations.max() <= limit]
    return sum(float(np.sum(one**2)) for one in kept), sum(len(one) - 1 for one in kept)


def _is_usable(point: GridPoint) -> bool:
    return bool(point.duration_us) and point.outcome is Outcome.ok
