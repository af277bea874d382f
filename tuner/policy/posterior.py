"""From what was measured to what was not: kriging of one key's candidates from measured neighbours.

The starting guess (`tuner.knowledge`) gives every candidate a mean and a standard deviation of its log
duration. Errors of that guess are correlated: all candidates of one size share what the fabric does, a
protocol or cell shares its own error over neighbouring sizes and channel counts. Conditioning on the slots
measured near the key turns a handful of calls into an opinion about every candidate. Nothing here assumes
that durations have one minimum over channels: far-apart rungs are only weakly tied.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SHARE_ALL: Final = 0.10
SHARE_PROTOCOL: Final = 0.10
SHARE_CELL: Final = 0.70
SHARE_OWN: Final = 0.10
"""How the variance of the starting guess splits; the last part belongs to one slot alone.

What NCCL chooses is what it believes best, so its guess is among the most flattering. If much of that error were taken
to be about all cells, those that nobody has tried would pass for slow, too, and never be tried.
"""
OCTAVES: Final = 3.0
CHANNEL_OCTAVES: Final = 1.5
MAX_POINTS: Final = 48


class Settings(NamedTuple):
    """Where settings lie: arrays of one length."""

    log2_bytes: Floats
    log2_channels: Floats
    algorithm: Ints
    protocol: Ints
    collective: Ints
    key: Ints

    @classmethod
    def of_table(cls, table: Floats, collective: Ints, key: Ints) -> Settings:
        """From rows of log2 bytes, log2 channels, algorithm, protocol, and whatever follows."""
        cells = table[:, 2:4].astype(np.int64)
        return cls(table[:, 0], table[:, 1], cells[:, 0], cells[:, 1], collective, key)


class Kinship(NamedTuple):
    """How errors of the starting guesses hang together on one machine."""

    amplitude: float = 1.0
    """Factor on all guesses' spreads."""
    across: float = 0.5
    """Correlation between two collectives, else the same."""
    common: float = 0.0
    """Standard deviation (log) of an error that all guesses on the machine share."""


CHOICES: Final = (
    ("amplitude", (1.0, 0.6, 1.5)),
    ("across", (0.5, 0.0, 0.9)),
)
DOUBT_OF_CHOICE: Final = 1.5
"""What another value than the usual one must be worth in log likelihood."""


def kinship_of(
    measured: Settings, measured_std: Floats, residual: Floats, noise_variance: Floats, start: Kinship
) -> Kinship:
    """The kinship under which the measured residuals are most likely, one property after the other from `start` on.

    How far guesses are off, and together with what else, is a property of the machine.
    """
    scales = measured_std[:, None] * measured_std
    noise = np.diag(noise_variance + 1e-9)
    best = start
    for name, values in CHOICES:
        scored = []
        for value in values:
            kinship = best._replace(**{name: value})
            covariance = correlation(measured, measured, kinship) * scales
            lower = np.linalg.cholesky(kinship.amplitude**2 * covariance + kinship.common**2 + noise)
            white = np.linalg.solve(lower, residual)
            score = -0.5 * float(white @ white) - float(np.log(np.diagonal(lower)).sum())
            scored.append((score - DOUBT_OF_CHOICE * (value != values[0]), kinship))
        best = max(scored)[1]
    return best


def correlation(first: Settings, second: Settings, kinship: Kinship) -> Floats:
    """Correlation of the starting guess's errors, shape [len(first), len(second)]."""

    def differences(name: str) -> Floats:
        gaps: Floats = getattr(first, name)[:, None] - getattr(second, name)[None, :]
        return gaps

    channels = differences("log2_channels")
    same_protocol = differences("protocol") == 0
    same_cell = same_protocol & (differences("algorithm") == 0)
    beside = _matern(np.abs(channels) * (1.0 / CHANNEL_OCTAVES))
    beside *= same_cell
    beside *= SHARE_CELL
    beside += SHARE_PROTOCOL * same_protocol
    beside += SHARE_ALL
    beside *= _matern(np.abs(differences("log2_bytes")) * (1.0 / OCTAVES))
    beside *= np.where(differences("collective") == 0, 1.0, kinship.across)
    beside += SHARE_OWN * (same_cell & (channels == 0) & (differences("key") == 0))
    return beside


def condition(
    prior_mean: Floats,
    prior_std: Floats,
    targets: Settings,
    measured: Settings,
    measured_std: Floats,
    residual: Floats,
    noise_variance: Floats,
    kinship: Kinship,
) -> tuple[Floats, Floats]:
    """Mean and standard deviation of the targets' log durations given measured residuals.

    `residual` is measured minus starting guess, `measured_std` that guess's standard deviation and
    `noise_variance` the variance of the measured mean. Shapes: targets [n], measured [m].
    """
    if not len(residual):
        return prior_mean, prior_std
    # That guesses were good for some cells says little of a cell that nobody has tried.
    is_tried = np.isin(16 * targets.algorithm + targets.protocol, 16 * measured.algorithm + measured.protocol)
    prior_std = prior_std * np.where(is_tried, kinship.amplitude, max(1.0, kinship.amplitude))
    measured_std = kinship.amplitude * measured_std
    inner = correlation(measured, measured, kinship) * (measured_std[:, None] * measured_std)
    inner += kinship.common**2
    inner[np.diag_indices_from(inner)] += noise_variance + 1e-9
    cross = correlation(targets, measured, kinship) * (prior_std[:, None] * measured_std) + kinship.common**2
    solved = np.linalg.solve(inner, np.column_stack([residual, cross.T]))
    mean: Floats = prior_mean + cross @ solved[:, 0]
    variance = prior_std**2 + kinship.common**2 - np.einsum("ij,ji->i", cross, solved[:, 1:])
    return mean, np.sqrt(np.maximum(variance, 1e-8))


def _matern(distance: Floats) -> Floats:
    scaled = distance * math.sqrt(3.0)
    result = np.exp(-scaled)
    result *= scaled + 1.0
    return result


def expected_improvement(edge: Floats, spread: Floats) -> Floats:
    """E[max(0, edge + spread * normal)]."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = edge / spread
        density = np.exp(-0.5 * np.minimum(scaled**2, 700.0)) / math.sqrt(2.0 * math.pi)
        below = 0.5 * (1.0 + _erf(scaled / math.sqrt(2.0)))
        result: Floats = np.where(np.isfinite(edge), edge * below + spread * density, 0.0)
    return result


def _erf(x: Floats) -> Floats:
    """Error function, Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7."""
    sign, x = np.sign(x), np.abs(np.clip(x, -6.0, 6.0))
    t = 1.0 / (1.0 + 0.3275911 * x)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    result: Floats = sign * (1.0 - series * np.exp(-x * x))
    return result
