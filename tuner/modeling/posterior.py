"""The posterior of call times: one Gaussian process over settings, message sizes and networks.

A guess (NCCL's cost with the learned correction) gives every row a mean and a standard deviation of its log duration.
Errors of guesses are correlated between neighbouring sizes, more so within one cell. The number of channels that fills
a link is about the same at all sizes. So a few measured calls predict every setting. Durations need not have a
single minimum over channels.

If the network changes, old measurements still count: all measurements of one regime share one deviation from the
job's first regime. So a setting that took three times as long as the others is still expected to do that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from .features import Floats, Ints


class Column(IntEnum):
    """Columns of a table with a row for each setting at each size."""

    log2_bytes = 0
    log2_channels = 1
    algorithm = 2
    protocol = 3
    guess = 4
    """Log microseconds; NaN: not available."""
    std = 5
    """Standard deviation (log) of the guess."""
    transfer_share = 6
    """Share of the guess that is proportional to the bytes."""
    octaves_fewer = 7
    """Octaves by which its channels are fewer than the communicator's."""
    collective = 8
    key = 9
    """Index of the decision key, or of the size."""


@dataclass(frozen=True)
class Kernel:
    """How errors of the guess are correlated. The first three are shares of its variance.

    NCCL chooses the setting with the least predicted time, so that guess is too low more often than others. If all
    cells shared much of its error, untried ones would look slow, too, and never be tried.
    """

    by_cell: float = 0.70
    by_others: float = 0.10
    """The share of all settings, and that of neighbouring channel counts of a cell."""
    own: float = 0.02
    octaves: float = 5.0
    """Length scale over sizes; twice as many octaves for `fill`, half as many over channels.

    On 102 simulated machines 5 saves more and loses less than 3; with 8 `rtx5090_loopback` finds nothing any more.
    """
    across_collectives: float = 0.5
    """Correlation of a cell's error between collectives."""
    fill: float = 0.15
    """The number of channels that fills a link is a guess. Per octave of channels below all of them, this share of the
    variance is added for the bandwidth part, and once more within one cell: an error at one count holds for all lower
    ones.
    """


KERNEL: Final = Kernel()
CHANGE_STD: Final = 0.7
"""How far (log) another network may be from the first: by a factor of two."""
SCALES: Final = (0.2, 0.4, 0.7, 1.0, 1.5, 2.5)
"""Factors on the guesses' standard deviations, one of which measurements select (`fitted_scale`)."""


class Known(NamedTuple):
    """Measurements: their rows of a table, their regimes and their residuals."""

    rows: Floats
    regime: Ints
    residual: Floats
    """Measured minus guessed (log)."""
    noise_variance: Floats
    """Noise variance of the measured mean."""


def matern(distance: Floats) -> Floats:
    """Correlation of a once differentiable surface by distance in length scales.

    The Matern covariance with nu = 3/2 (Rasmussen and Williams, Gaussian Processes for Machine Learning, eq. 4.17).
    """
    scaled = distance * math.sqrt(3.0)
    result: Floats = np.exp(-scaled)
    scaled += 1.0
    result *= scaled
    return result


def covariance(first: Floats, second: Floats) -> Floats:
    """Covariance of the guesses' errors in units of their standard deviations; rows of `Column`s, n by m."""
    one, two = first.T[:, :, None], second.T
    sizes, channels = (np.abs(one[at] - two[at]) for at in (Column.log2_bytes, Column.log2_channels))
    same_cell = (one[Column.protocol] == two[Column.protocol]) & (one[Column.algorithm] == two[Column.algorithm])
    near = matern(sizes / KERNEL.octaves)
    shared: Floats = (KERNEL.by_cell * same_cell + KERNEL.by_others) * near
    shared += KERNEL.by_others * same_cell * near * matern(channels / (0.5 * KERNEL.octaves))
    fill = one[Column.transfer_share] * two[Column.transfer_share]
    fill *= np.minimum(one[Column.octaves_fewer], two[Column.octaves_fewer])
    shared += KERNEL.fill * (1.0 + same_cell) * fill * matern(sizes / (2.0 * KERNEL.octaves))
    shared *= np.where(one[Column.collective] == two[Column.collective], 1.0, KERNEL.across_collectives)
    shared += KERNEL.own * (same_cell & (channels == 0) & (one[Column.key] == two[Column.key]))
    return shared


def condition(rows: Floats, known: Known, common_std: float, regime: int = 0) -> tuple[Floats, Floats]:
    """Mean and standard deviation of the log durations of `rows` (of `Column`s), each [n], given measurements.

    `common_std` is the standard deviation of an error (log) that all guesses on the machine share.
    """
    guess, std, fewer, share = rows.T[[Column.guess, Column.std, Column.octaves_fewer, Column.transfer_share]]
    # The diagonal of `covariance`.
    own = KERNEL.by_cell + 2.0 * KERNEL.by_others + KERNEL.own + 2.0 * KERNEL.fill * fewer * share**2
    variance = std**2 * own + common_std**2 + CHANGE_STD**2 * (regime != 0)
    if not len(known.residual):
        return guess, np.sqrt(variance)
    cross, inner = _to_known(rows, known, common_std, regime)
    solved = np.linalg.solve(inner, np.concatenate([known.residual[None], cross]).T)
    variance -= np.einsum("ij,ji->i", cross, solved[:, 1:])
    return guess + cross @ solved[:, 0], np.sqrt(np.maximum(variance, 1e-8))


def joint(groups: Sequence[Floats], known: Known, common_std: float) -> list[tuple[Floats, Floats]]:
    """Mean, shape [n], and covariance, shape [n, n], of the log durations of every group of n rows in regime 0.

    `common_std` is as in `condition`.
    """
    cross, inner = _to_known(np.concatenate(groups), known, common_std)
    lower = np.linalg.cholesky(inner)
    solved = np.linalg.solve(lower, np.concatenate([known.residual[None], cross]).T)
    residual, parts = solved[:, 0], np.split(solved[:, 1:], np.cumsum([*map(len, groups)])[:-1], axis=1)
    return [
        (rows[:, Column.guess] + residual @ part, _in_logs(rows, rows) + common_std**2 - part.T @ part)
        for rows, part in zip(groups, parts, strict=True)
    ]


def fitted_scale(known: Known, common_std: float) -> float:
    """The factor of `SCALES` on the guesses' standard deviations with the highest likelihood."""
    near, rest = _in_logs(known.rows, known.rows), common_std**2 + np.diag(known.noise_variance + 1e-9)
    likelihoods = []
    for scale in SCALES:
        lower = np.linalg.cholesky(scale**2 * near + rest)
        squares = float(np.sum(np.linalg.solve(lower, known.residual) ** 2))
        likelihoods.append(-0.5 * squares - float(np.log(np.diag(lower)).sum()))
    return SCALES[int(np.argmax(likelihoods))]


def _to_known(rows: Floats, known: Known, common_std: float, regime: int = 0) -> tuple[Floats, Floats]:
    """Covariance of `rows` (n) and of measurements (m) with the measurements, [n, m] and [m, m]."""
    n, places = len(rows), known.rows
    every = np.concatenate([rows, places])
    both = _in_logs(every, places)
    both += common_std**2
    if regime or np.count_nonzero(known.regime):
        regimes = np.concatenate([np.full(n, regime), known.regime])
        sizes = np.subtract.outer(every[:, Column.log2_bytes], places[:, Column.log2_bytes])
        is_same = np.equal.outer(regimes, known.regime) & (known.regime != 0)
        both += CHANGE_STD**2 * matern(np.abs(sizes) / KERNEL.octaves) * is_same
    cross, inner = both[:n], both[n:]
    inner.flat[:: len(inner) + 1] += known.noise_variance + 1e-9
    return cross, inner


def _in_logs(first: Floats, second: Floats) -> Floats:
    """`covariance` in logs."""
    found = covariance(first, second)
    found *= first[:, Column.std, None] * second[:, Column.std]
    return found


def expected_improvement(edge: Floats | float, spread: Floats | float) -> Floats:
    """E[max(0, edge + spread * normal)]."""
    from scipy.special import ndtr  # takes 0.3 s to load: a daemon loads it with its first job

    with np.errstate(invalid="ignore", over="ignore"):
        scaled = edge / spread
        density = np.exp(-0.5 * np.minimum(scaled**2, 700.0)) / math.sqrt(2.0 * math.pi)
        below = ndtr(scaled)
        result: Floats = np.where(np.isfinite(edge), edge * below + spread * density, 0.0)
    return result


def expected_excess(edge: Floats, spread: Floats) -> Floats:
    """E[max(0, exp(edge + spread * normal) - 1)]: the expected extra time, as a share; faster outcomes count as 0."""
    from scipy.special import ndtr  # takes 0.3 s to load: a daemon does without until its first decision

    with np.errstate(invalid="ignore", over="ignore"):
        scaled = edge / spread
        mean = np.exp(np.minimum(edge + 0.5 * spread**2, 6.0))
        excess = mean * ndtr(scaled + spread) - ndtr(scaled)
        result: Floats = np.where(np.isfinite(edge), np.maximum(excess, 0.0), np.inf)
    return result
