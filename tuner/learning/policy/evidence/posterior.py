"""From what was measured to what was not: kriging of one key's candidates from measured neighbours.

The starting guess (knowledge.py) gives every candidate a mean and a standard deviation of its log
duration. Errors of that guess are correlated: all candidates of one size share what the fabric does, a
protocol or cell shares the error of its latency at all small sizes and that of its bandwidth at all large
ones, and how many channels fill a link is about the same at all sizes. Conditioning on the slots measured near
the key turns a handful of calls into an opinion about every candidate. Nothing here assumes that durations
have one minimum over channels.
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
SHARE_LINE: Final = 0.5
"""So much of what is shared is an error of latencies, or of bandwidths, at all sizes; the rest fades over sizes."""
OCTAVES: Final = 3.0
CHANNEL_OCTAVES: Final = 1.5
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


class Kinship(NamedTuple):
    """How errors of the starting guesses hang together on one machine."""

    amplitude: float = 1.0
    """Factor on all guesses' spreads."""
    across: float = 0.5
    """Correlation between two collectives, else the same."""
    common: float = 0.0
    """Standard deviation (log) of an error that all guesses on the machine share."""


CHOICES: Final = (
    ("amplitude", (1.0, 1.5)),
    ("across", (0.5, 0.0, 0.75)),
)
"""The usual value first. What was tried was promising, and NCCL's own choice flatters its guess: that these guesses
were good, or agree between collectives, says less of the others. So no doubt is smaller than the usual one, and a cell
that is slow in one collective is never thought to be as surely slow in another.
"""
DOUBT_OF_CHOICE: Final = 1.5
"""What another value than the usual one must be worth in log likelihood."""


def kinship_of(known: Known, start: Kinship) -> Kinship:
    """The kinship under which the measured residuals are most likely, one property after the other from `start` on.

    How far guesses are off, and together with what else, is a property of the machine.
    """
    scales = known.std[:, None] * known.std
    noise = np.diag(known.noise_variance + 1e-9)
    best = start
    for name, values in CHOICES:
        scored = []
        for value in values:
            kinship = best._replace(**{name: value})
            errors = covariance(known.place, known.place, kinship) * scales
            lower = np.linalg.cholesky(kinship.amplitude**2 * errors + kinship.common**2 + noise)
            white = np.linalg.solve(lower, known.residual)
            score = -0.5 * float(white @ white) - float(np.log(np.diagonal(lower)).sum())
            scored.append((score - DOUBT_OF_CHOICE * (value != values[0]), kinship))
        best = max(scored)[1]
    return best


def covariance(first: SettingPoints, second: SettingPoints, kinship: Kinship) -> Floats:
    """Covariance of the starting guesses' errors, in units of their spreads.

    Args:
        first: n points.
        second: m points.
        kinship: how far guesses are off together.

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
    ours, theirs = first.transfer_share[:, None], second.transfer_share
    transfers = ours * theirs
    line = transfers + (1.0 - ours) * (1.0 - theirs)
    shared = SHARE_CELL * same_cell
    shared += SHARE_PROTOCOL * same_protocol
    shared += SHARE_ALL
    line *= SHARE_LINE
    line += (1.0 - SHARE_LINE) * near
    shared *= line
    near *= _matern(channels * (1.0 / CHANNEL_OCTAVES))
    near *= SHARE_NEAR * same_cell
    shared += near
    transfers *= np.minimum.outer(first.octaves_fewer, second.octaves_fewer)
    transfers *= _matern(sizes * (1.0 / FILL_OCTAVES))
    transfers *= FILL_CELL * same_cell + FILL_ALL
    shared += transfers
    shared *= np.where(differences("collective") == 0, 1.0, kinship.across)
    own: Floats = SHARE_OWN * (same_cell & (channels == 0) & (differences("key") == 0))
    own += shared
    return own


def variance_of(settings: SettingPoints) -> Floats:
    """The diagonal of `covariance`."""
    share = settings.transfer_share
    line = SHARE_LINE * (share**2 + (1.0 - share) ** 2) + 1.0 - SHARE_LINE
    fill = (FILL_ALL + FILL_CELL) * settings.octaves_fewer * share**2
    variance: Floats = (SHARE_ALL + SHARE_PROTOCOL + SHARE_CELL) * line + SHARE_NEAR + fill + SHARE_OWN
    return variance


def condition(guess: Guess, known: Known, kinship: Kinship) -> tuple[Floats, Floats]:
    """Condition durations on what is known (Gaussian process).

    Args:
        guess: n points with starting guesses.
        known: m measured points.
        kinship: how far guesses are off together.

    Returns:
        Mean and standard deviation of the log durations, each [n].
    """
    if not len(known.residual):
        return guess.mean, guess.std
    mean, std, cross, solved = _conditioned(guess, known, kinship)
    variance = std**2 * variance_of(guess.place) + kinship.common**2 - np.einsum("ij,ji->i", cross, solved)
    return mean, np.sqrt(np.maximum(variance, 1e-8))


def condition_gains(guess: Guess, known: Known, kinship: Kinship) -> tuple[Floats, Floats]:
    """Condition gains over the first point on what is known.

    What both are off together cancels out, so the gain is surer than the durations.

    Args:
        guess: n points with starting guesses.
        known: m measured points.
        kinship: how far guesses are off together.

    Returns:
        Mean and standard deviation of the gains (log), each [n].
    """
    mean, std, cross, solved = _conditioned(guess, known, kinship)
    own = std**2 * variance_of(guess.place) - np.einsum("ij,ji->i", cross, solved)
    shared = covariance(guess.place.first(), guess.place, kinship)[0] * std[0] * std - cross[0] @ solved
    variance = own[0] + own - 2.0 * shared
    return mean[0] - mean, np.sqrt(np.maximum(variance, 1e-8))


def _conditioned(guess: Guess, known: Known, kinship: Kinship) -> tuple[Floats, Floats, Floats, Floats]:
    """Means and standard deviations of the guesses, and what their covariance follows from.

    That is the covariance of guesses and measured residuals, shape [n, m], and the part of it that these explain,
    shape [m, n].
    """
    prior_std, measured_std = kinship.amplitude * guess.std, kinship.amplitude * known.std
    inner = covariance(known.place, known.place, kinship) * (measured_std[:, None] * measured_std)
    inner += kinship.common**2
    inner[np.diag_indices_from(inner)] += known.noise_variance + 1e-9
    cross = covariance(guess.place, known.place, kinship) * (prior_std[:, None] * measured_std) + kinship.common**2
    solved = np.asarray(np.linalg.solve(inner, np.column_stack([known.residual, cross.T])), np.float64)
    return guess.mean + cross @ solved[:, 0], prior_std, cross, solved[:, 1:]


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
