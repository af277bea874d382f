"""From what was measured to what was not: kriging of one key's candidates from measured neighbours.

The starting guess (knowledge.py) gives every candidate a mean and a standard deviation of its log
duration. Errors of that guess are correlated: candidates of neighbouring sizes share what the fabric does, more so
those of one protocol or cell, and how many channels fill a link is about the same at all sizes. Conditioning on the
slots measured near the key turns a handful of calls into an opinion about every candidate. Nothing here assumes that
durations have one minimum over channels.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SHARE_ALL: Final = 0.10
SHARE_PROTOCOL: Final = 0.10
SHARE_CELL: Final = 0.60
SHARE_NEAR: Final = 0.10
SHARE_OWN: Final = 0.02
"""How the variance of the starting guess splits: what all settings share, a protocol, a cell, neighbouring channel
counts of a cell at neighbouring sizes, and what belongs to one slot alone.

What NCCL chooses is what it believes best, so its guess is among the most flattering. If much of that error were taken
to be about all cells, those that nobody has tried would pass for slow, too, and never be tried.
"""
OCTAVES: Final = 3.0
CHANNEL_OCTAVES: Final = 1.5
ACROSS: Final = 0.5
"""Correlation between two collectives: a cell that is slow in one is not surely slow in another."""
FILL_ALL: Final = 0.15
FILL_CELL: Final = 0.15
FILL_OCTAVES: Final = 6.0
"""How many channels fill a link is a guess. Per octave of channels below all of them, this share of the variance is
added for the bandwidth part: what is wrong at one count is wrong at all lower ones. Cells share half of that.
"""
MAX_POINTS: Final = 48


class SettingPoints(NamedTuple):
    """Where settings lie: arrays of one length."""

    log2_bytes: Floats
    log2_channels: Floats
    algorithm: Ints
    protocol: Ints
    collective: Ints
    key: Ints
    transfer_share: Floats
    octaves_fewer: Floats

    @classmethod
    def of_table(cls, table: Floats, collective: Ints, key: Ints) -> SettingPoints:
        """From rows as in `Field.table`.

        Args:
            table: shape [n, N_COLUMNS].
            collective: of each row, shape [n].
            key: index of each row's key, shape [n].

        Returns:
            The points.
        """
        cells = table[:, 2:4].astype(np.int64)
        return cls(table[:, 0], table[:, 1], cells[:, 0], cells[:, 1], collective, key, table[:, 6], table[:, 7])

    def first(self) -> SettingPoints:
        """The first one alone."""
        return SettingPoints._make(column[:1] for column in self)


class Guess(NamedTuple):
    """Starting guesses of log durations: where they lie, their means and standard deviations."""

    place: SettingPoints
    mean: Floats
    std: Floats


class Known(NamedTuple):
    """What was measured: where, and against which guesses."""

    place: SettingPoints
    std: Floats
    """Of the guess."""
    residual: Floats
    """Measured minus guessed."""
    noise_variance: Floats
    """Of the measured mean."""


def covariance(first: SettingPoints, second: SettingPoints) -> Floats:
    """Covariance of the starting guesses' errors, in units of their spreads.

    Args:
        first: n points.
        second: m points.

    Returns:
        Shape [n, m].
    """

    def differences(name: str) -> Floats:
        gaps: Floats = getattr(first, name)[:, None] - getattr(second, name)[None, :]
        return gaps

    sizes, channels = np.abs(differences("log2_bytes")), np.abs(differences("log2_channels"))
    same_protocol = differences("protocol") == 0
    same_cell = same_protocol & (differences("algorithm") == 0)
    near = _matern(sizes * (1.0 / OCTAVES))
    shared = SHARE_CELL * same_cell
    shared += SHARE_PROTOCOL * same_protocol
    shared += SHARE_ALL
    shared *= near
    near *= _matern(channels * (1.0 / CHANNEL_OCTAVES))
    near *= SHARE_NEAR * same_cell
    shared += near
    transfers = np.multiply.outer(first.transfer_share, second.transfer_share)
    transfers *= np.minimum.outer(first.octaves_fewer, second.octaves_fewer)
    transfers *= _matern(sizes * (1.0 / FILL_OCTAVES))
    transfers *= FILL_CELL * same_cell + FILL_ALL
    shared += transfers
    shared *= np.where(differences("collective") == 0, 1.0, ACROSS)
    own: Floats = SHARE_OWN * (same_cell & (channels == 0) & (differences("key") == 0))
    own += shared
    return own


def variance_of(settings: SettingPoints) -> Floats:
    """The diagonal of `covariance`."""
    fill = (FILL_ALL + FILL_CELL) * settings.octaves_fewer * settings.transfer_share**2
    variance: Floats = SHARE_ALL + SHARE_PROTOCOL + SHARE_CELL + SHARE_NEAR + SHARE_OWN + fill
    return variance


def condition(guess: Guess, known: Known, common_std: float) -> tuple[Floats, Floats]:
    """Condition durations on what is known (Gaussian process).

    Args:
        guess: n points with starting guesses.
        known: m measured points.
        common_std: of an error (log) that all guesses on the machine share.

    Returns:
        Mean and standard deviation of the log durations, each [n].
    """
    if not len(known.residual):
        return guess.mean, guess.std
    mean, cross, solved = _conditioned(guess, known, common_std)
    variance = guess.std**2 * variance_of(guess.place) + common_std**2 - np.einsum("ij,ji->i", cross, solved)
    return mean, np.sqrt(np.maximum(variance, 1e-8))


def condition_gains(guess: Guess, known: Known, common_std: float) -> tuple[Floats, Floats]:
    """Condition gains over the first point on what is known.

    What both are off together cancels out, so the gain is surer than the durations.

    Args:
        guess: n points with starting guesses.
        known: m measured points.
        common_std: of an error (log) that all guesses on the machine share.

    Returns:
        Mean and standard deviation of the gains (log), each [n].
    """
    std = guess.std
    mean, cross, solved = _conditioned(guess, known, common_std)
    own = std**2 * variance_of(guess.place) - np.einsum("ij,ji->i", cross, solved)
    shared = covariance(guess.place.first(), guess.place)[0] * std[0] * std - cross[0] @ solved
    variance = own[0] + own - 2.0 * shared
    return mean[0] - mean, np.sqrt(np.maximum(variance, 1e-8))


def _conditioned(guess: Guess, known: Known, common_std: float) -> tuple[Floats, Floats, Floats]:
    """Means of the guesses, and what their covariance follows from.

    That is the covariance of guesses and measured residuals, shape [n, m], and the part of it that these explain,
    shape [m, n].
    """
    n, std = len(guess.std), np.concatenate([guess.std, known.std])
    everywhere = SettingPoints(*(np.concatenate(parts) for parts in zip(guess.place, known.place, strict=True)))
    both = covariance(everywhere, known.place) * (std[:, None] * known.std) + common_std**2
    cross, inner = both[:n], both[n:]
    inner[np.diag_indices_from(inner)] += known.noise_variance + 1e-9
    solved = np.asarray(np.linalg.solve(inner, np.column_stack([known.residual, cross.T])), np.float64)
    return guess.mean + cross @ solved[:, 0], cross, solved[:, 1:]


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
        below = ndtr(scaled)
        result: Floats = np.where(np.isfinite(edge), edge * below + spread * density, 0.0)
    return result


def expected_excess(edge: Floats, spread: Floats) -> Floats:
    """E[max(0, exp(edge + spread * normal) - 1)]: by what share something takes longer, where it does."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = edge / spread
        mean = np.exp(np.minimum(edge + 0.5 * spread**2, 6.0))
        excess = mean * ndtr(scaled + spread) - ndtr(scaled)
        result: Floats = np.where(np.isfinite(edge), np.maximum(excess, 0.0), np.inf)
    return result


def odds_above(edge: Floats, spread: Floats) -> Floats:
    """Probability of edge + spread * normal > 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        result: Floats = np.where(np.isfinite(edge), ndtr(edge / spread), 0.0)
    return result
