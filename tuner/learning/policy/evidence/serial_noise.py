"""Noise that neighbouring steps share: congestion that comes and goes, a neighbour's bursts.

Where steps are alike, settings that ran at different times differ by what the network did then. Such noise is taken for
a part that every step has of its own and a part whose correlation fades with the steps between (an exponential
covariance with a nugget). How large that part is and how far it reaches is a property of the machine, told by the
likelihood of what its keys measured. Settings are then compared by generalised least squares: what ran in neighbouring
steps says most about their difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DEPTH: Final = 64
"""Units of each key that are compared when steps are alike."""
NOBODY: Final = -1
"""The slot of units that are forgotten."""
LEAST_UNITS: Final = 8
GROWTH: Final = 1.25
"""The noise of a key is estimated anew once its units have grown by this factor."""
DOUBT: Final = 3.0
"""What noise that steps share must be worth in log likelihood."""
PRIOR_UNITS: Final = 4.0
PRIOR_SIGMA: Final = 0.04
"""Noise of a unit (log) before anything is known, and how many units that opinion weighs."""


class SharedNoise(NamedTuple):
    """What steps share, beside what each has of its own (1)."""

    size: float
    """Its variance."""
    reach: float
    """Its correlation from one step to the next."""

    def covariance(self, steps: Ints) -> Floats:
        """Of units measured in these steps, shape [n, n]."""
        apart = np.abs(steps[:, None] - steps[None, :]).astype(np.float64)
        result: Floats = self.size * self.reach**apart
        result[np.diag_indices_from(result)] += 1.0
        return result


NONE: Final = SharedNoise(0.0, 0.0)
REACHES: Final = (0.5, 0.8, 0.95, 0.99)
SIZES: Final = (0.3, 1.0, 3.0, 10.0)
CHOICES: Final = (NONE, *(SharedNoise(size, reach) for reach in REACHES for size in SIZES))
CHANGING: Final = SharedNoise(3.0, 0.95)
"""What a gain is checked by: the network may be changing just now."""
RUN_BEFORE: Final = 0.5
"""Share of the trial's units after which the incumbent must have run once more."""
AGREES: Final = 0.5


class Units(NamedTuple):
    """One key's newest units, oldest first: step, slot and mean log duration."""

    steps: Ints
    slots: Ints
    values: Floats


class UnitHistory:
    """The newest `DEPTH` units of every key."""

    def __init__(self) -> None:
        self._steps = np.zeros((0, DEPTH), np.int64)
        self._slots = np.zeros((0, DEPTH), np.int64)
        self._values = np.zeros((0, DEPTH))
        self.fits: dict[int, tuple[tuple[object, ...], _Fit]] = {}
        """What was last worked out of a key, and from what."""
        self._counts = np.zeros((0, DEPTH), np.int64)
        self.n_units = np.zeros(0, np.int64)
        """Of each key since the beginning."""

    def add(self, keys: Ints, slots: Ints, step: int, counts: Ints, values: Floats) -> None:
        """Take in calls of one step.

        Args:
            keys: distinct key indices, shape [n].
            slots: that ran, one of each key, shape [n].
            step: of the calls.
            counts: calls of each, shape [n].
            values: their mean log duration, shape [n].
        """
        self._grow(int(keys.max()) + 1)
        last = (self.n_units[keys] - 1) % DEPTH
        goes_on = (self.n_units[keys] > 0) & (self._steps[keys, last] == step) & (self._slots[keys, last] == slots)
        at = np.where(goes_on, last, (last + 1) % DEPTH)
        before = np.where(goes_on, self._counts[keys, at], 0)
        self._values[keys, at] = (before * np.where(goes_on, self._values[keys, at], 0.0) + counts * values) / (
            before + counts
        )
        self._counts[keys, at] = before + counts
        self._steps[keys, at], self._slots[keys, at] = step, slots
        self.n_units[keys] += ~goes_on

    def forget(self, keys: Ints, slots: Ints) -> None:
        """What these slots (one of each key) measured so far is compared with nothing."""
        for key, slot in zip(keys.tolist(), slots.tolist(), strict=True):
            self._slots[key, self._slots[key] == slot] = NOBODY

    def of(self, key: int) -> Units:
        """The newest units of one key."""
        n = int(self.n_units[key]) if key < len(self.n_units) else 0
        order = np.arange(max(0, n - DEPTH), n) % DEPTH
        return Units(self._steps[key, order], self._slots[key, order], self._values[key, order])

    def stamp(self, key: int) -> tuple[int, int]:
        """The same for as long as a key has measured nothing more."""
        n_units = int(self.n_units[key])
        return n_units, int(self._counts[key, (n_units - 1) % DEPTH])

    def _grow(self, n_keys: int) -> None:
        if (more := n_keys - len(self.n_units)) > 0:
            more = max(more, 64, len(self.n_units))
            for name in ("_steps", "_slots", "_values", "_counts", "n_units"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros((more, *old.shape[1:]), old.dtype)]))


class Contrast(NamedTuple):
    """By how much (log) one setting is faster than another, and how well that is known."""

    gain: float
    pairs: float
    """Number of pairs of independent units that would say as much; 0 where nothing is known."""
    sigma: float
    """Standard deviation (log) of such a unit."""


@lru_cache(maxsize=256)
def _whitening(noise: SharedNoise, steps: bytes) -> tuple[Floats, float]:
    """Matrix that makes units of these steps (counted from the first) independent, and their log determinant.

    Keys that are called in the same steps share it.
    """
    lower = np.linalg.cholesky(noise.covariance(np.frombuffer(steps, np.int64)))
    return np.linalg.inv(lower), 2.0 * float(np.log(np.diagonal(lower)).sum())


class _Fit(NamedTuple):
    slots: Ints
    means: Floats
    inverse: Floats
    """Covariance of `means` in units of the noise's variance."""
    residual: float
    """Sum of squares in these units."""
    n_free: int
    """Degrees of freedom of `residual`."""
    log_determinant: float


def _fit(units: Units, noise: SharedNoise) -> _Fit:
    return next(_fits(units, (noise,)))


def _fits(units: Units, noises: Iterable[SharedNoise]) -> Iterator[_Fit]:
    slots, of = np.unique(units.slots, return_inverse=True)
    design = np.zeros((len(of), 1 + len(slots)))
    design[:, 0] = units.values
    design[np.arange(len(of)), 1 + of] = 1.0
    steps = (units.steps - units.steps[0]).tobytes()
    for noise in noises:
        whiten, log_determinant = _whitening(noise, steps)
        white = whiten @ design
        values, members = white[:, 0], white[:, 1:]
        inverse = np.asarray(np.linalg.inv(members.T @ members), np.float64)
        means = inverse @ (members.T @ values)
        rest = values - members @ means
        log_determinant -= float(np.linalg.slogdet(inverse)[1])
        yield _Fit(slots, means, inverse, float(rest @ rest), len(of) - len(slots), log_determinant)


UNKNOWN: Final = Contrast(0.0, 0.0, 1.0)


class NoiseModel:
    """What steps share, as all keys together tell it; one more key is asked in each window."""

    def __init__(self) -> None:
        self.noise = NONE
        """What the keys' units say; settings are compared by it."""
        self._scores: dict[int, tuple[float, Floats, Floats]] = {}
        """By key: its units when it was asked, log likelihood and variance of a unit by choice."""
        self._next = 0

    @property
    def variance(self) -> float:
        """Of a unit's own noise (log), over all keys."""
        at = CHOICES.index(self.noise)
        known = [variances[at] for _, _, variances in self._scores.values()]
        return float(np.mean(known)) if known else PRIOR_SIGMA**2

    def ask(self, history: UnitHistory, keys: Sequence[int]) -> None:
        """Ask the next of `keys` that has measured more since it was asked."""
        for offset in range(len(keys)):
            key = keys[(self._next + offset) % len(keys)]
            n_units = float(history.n_units[key]) if key < len(history.n_units) else 0.0
            asked = self._scores[key][0] if key in self._scores else 0.0
            if n_units >= LEAST_UNITS and not asked <= n_units < min(GROWTH * asked, asked + DEPTH):
                self._next = (self._next + offset + 1) % len(keys)
                self._score(key, n_units, history.of(key))
                return

    def _score(self, key: int, n_units: float, units: Units) -> None:
        fits = [*_fits(units, CHOICES)]
        n_free = fits[0].n_free + PRIOR_UNITS
        variances = (np.array([one.residual for one in fits]) + PRIOR_UNITS * PRIOR_SIGMA**2) / n_free
        likelihood = -0.5 * (n_free * np.log(variances) + np.array([one.log_determinant for one in fits]))
        self._scores[key] = n_units, likelihood - likelihood[0], variances
        total = np.sum([scores for _, scores, _ in self._scores.values()], axis=0)
        total[0] += DOUBT
        self.noise = CHOICES[int(np.argmax(total))]

    def agrees(self, history: UnitHistory, key: int, first: int, second: int, gain: float) -> bool:
        """Whether neighbouring steps show the gain, too: the network may have changed just as the second slot ran.

        Args:
            history: of units.
            key: index of the key.
            first: slot.
            second: slot of the same key.
            gain: of the second over the first (log).

        Returns:
            True if they show a good part of it.
        """
        units = history.of(key)
        here, there = units.steps[units.slots == first], units.steps[units.slots == second]
        if not len(here) or np.count_nonzero(there < here[-1]) < RUN_BEFORE * len(there):
            return False
        return _contrast(_fit(units, CHANGING), self.variance, first, second).gain > AGREES * gain

    def contrast(self, history: UnitHistory, key: int, first: int, second: int, noise: SharedNoise) -> Contrast:
        """By how much the second slot of a key is faster than the first.

        Args:
            history: of units.
            key: index of the key.
            first: slot.
            second: slot of the same key.
            noise: what steps share.

        Returns:
            The gain (log) and how well it is known.
        """
        if key >= len(history.n_units) or not history.n_units[key]:
            return UNKNOWN
        stamp = noise, *history.stamp(key)
        known = history.fits.get(key)
        if known is None or known[0] != stamp:
            known = history.fits[key] = stamp, _fit(history.of(key), noise)
        return _contrast(known[1], self.variance, first, second)


def _contrast(found: _Fit, variance: float, first: int, second: int) -> Contrast:
    places = np.searchsorted(found.slots, (first, second))
    if (places >= len(found.slots)).any() or (found.slots[places] != (first, second)).any():
        return UNKNOWN
    one, other = places
    gain = float(found.means[one] - found.means[other])
    spread = found.inverse[one, one] + found.inverse[other, other] - 2.0 * found.inverse[one, other]
    variance = (PRIOR_UNITS * variance + found.residual) / (PRIOR_UNITS + found.n_free)
    return Contrast(gain, 1.0 / float(spread), math.sqrt(variance))
