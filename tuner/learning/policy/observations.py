"""What this job measured, as flat arrays: one *slot* per (key, candidate); and by how much one is faster than another.

Durations enter as natural logs. One training step's calls of a slot share whatever that step suffered, so
the unit of evidence is the *step mean*, not the call: a hundred calls of one bad step count once. Single
calls are clipped around the slot's running centre first, so that a straggler moves a mean by little.

Neighbouring steps share noise, too: congestion that comes and goes, a neighbour's bursts. Where steps are alike,
settings that ran at different times differ by what the network did then. Such noise is taken for a part that every step
has of its own and a part whose correlation fades with the steps between (an exponential covariance with a nugget). How
large that part is and how far it reaches is a property of the machine, told by the likelihood of what its keys
measured. Settings are then compared by generalised least squares: what ran in neighbouring steps says most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from zerotune.store.records import Candidate
from zerotune.tuner.modeling.features import Floats, Ints, cell_of

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


CLIP: Final = 6.0
"""Calls further from their slot's centre than this many noise scales are pulled in."""
CLIP_AT_LEAST: Final = 0.1
MEMORY: Final = 160
"""Units after which older ones fade, so that slow drift is followed."""
CALL_MEMORY: Final = 400.0

class Calls(NamedTuple):
    """Calls grouped by slot: the distinct slots, each call's place among them, centres, deviations from them."""

    slots: Ints
    of: Ints
    centre: Floats
    deviation: Floats


class CallEvidence:
    """Running statistics of all slots of one regime; what its steps share is the same in all regimes."""

    def __init__(self, noise: NoiseModel | None = None, regime: int = 0) -> None:
        self.noise = noise or NoiseModel()
        self.regime = regime
        """Its label; 0 is the one that the job began with."""
        self.history = UnitHistory()
        self._newest_step = 0
        self._index: dict[tuple[int, Candidate], int] = {}
        self.candidates: list[Candidate] = []
        self._of_key: dict[int, list[int]] = {}
        self.key = np.zeros(0, np.int64)
        self.algorithm = np.zeros(0, np.int64)
        """That is asked for, 255 where the choice is NCCL's; so is the protocol."""
        self.protocol = np.zeros(0, np.int64)
        self.n_calls = np.zeros(0, np.int64)
        self.n_units = np.zeros(0, np.int64)
        self.mean = np.zeros(0)
        """Of the units."""
        self.spread = np.zeros(0)
        """Sum of squared deviations of the units."""
        self.extra_us = np.zeros(0)
        """Measured microseconds over the incumbent, signed, while the slot was on trial."""
        self._open_step = np.zeros(0, np.int64)
        self._open_calls = np.zeros(0, np.int64)
        self._open_sum = np.zeros(0)
        self._pooled = (0.0, 0.0)
        self._key_dof = np.zeros(0)
        self._key_spread = np.zeros(0)
        self._call_dof = np.zeros(0)
        self._call_spread = np.zeros(0)
        self._pooled_calls = (0.0, 0.0)

    def __len__(self) -> int:
        return len(self.candidates)

    def find(self, key: int, candidate: Candidate) -> int | None:
        """Slot of `candidate` at key index `key`, None when it was never made."""
        return self._index.get((key, candidate))

    def has_measured(self, key: int, candidate: Candidate) -> bool:
        """Whether a call of `candidate` at key index `key` was measured."""
        slot = self.find(key, candidate)
        return slot is not None and bool(self.n_calls[slot])

    def slot(self, key: int, candidate: Candidate) -> int:
        """Slot of `candidate` at key index `key`, made if need be."""
        found = self._index.get((key, candidate))
        if found is None:
            found = len(self.candidates)
            self._index[key, candidate] = found
            self._of_key.setdefault(key, []).append(found)
            if key >= len(self._key_dof):
                more = np.zeros(max(64, 2 * key) - len(self._key_dof))
                self._key_dof = np.concatenate([self._key_dof, more])
                self._key_spread = np.concatenate([self._key_spread, more])
            self.candidates.append(candidate)
            if found >= len(self.key):
                self._grow(max(256, 2 * found))
            self.key[found] = key
            self.algorithm[found], self.protocol[found] = cell_of(candidate)
        return found

    def forget(self, slots: Ints) -> None:
        """What the only call of each of these slots took says nothing."""
        for one in (self.n_calls, self.n_units, self._open_calls):
            one[slots] = 0
        self._open_sum[slots] = self.mean[slots] = self.spread[slots] = 0.0
        self.history.forget(self.key[slots], slots)

    def slots_of(self, key: int) -> list[int]:
        """All slots of key index `key`."""
        return self._of_key.get(key, [])

    def _grow(self, capacity: int) -> None:
        for name in ("key", "algorithm", "protocol", "n_calls", "n_units", "_open_step", "_open_calls"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(capacity - len(old), np.int64)]))
        for name in ("mean", "spread", "extra_us", "_open_sum", "_call_dof", "_call_spread"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(capacity - len(old))]))

    def calls(self, slots: Ints, logs: Floats) -> Calls:
        """Calls grouped by slot, against what each slot took so far; slot and log duration of each, at least one."""
        touched, of = grouped(slots, len(self))
        centre = self.centre(touched)
        if (fresh := np.isnan(centre)).any():
            medians = np.zeros(len(touched))
            medians[of] = group_median(of, logs)
            centre = np.where(fresh, medians, centre)
        return Calls(touched, of, centre, logs - centre[of])

    def add(self, calls: Calls, steps: Ints) -> None:
        """Take in calls of `steps`, in the order they happened."""
        slots, of = calls.slots, calls.of
        limit = max(CLIP_AT_LEAST, CLIP * self._typical())
        # A slot without history has only the block's median to go by: be generous there.
        limits = np.where(self.n_units[slots] < 2, 4 * limit, limit)[of]
        deviation = np.minimum(np.maximum(calls.deviation, -limits), limits)
        self._learn_call_noise(slots, of, deviation)
        first = int(steps[0])
        if (steps == first).all():
            self._add_step(first, slots, *_totals(of, deviation, len(slots)), calls.centre)
            return
        for step in np.unique(steps).tolist():
            here = steps == step
            counts, sums = _totals(of[here], deviation[here], len(slots))
            there = counts > 0
            self._add_step(step, slots[there], counts[there], sums[there], calls.centre[there])

    def centre(self, slots: Ints) -> Floats:
        """Best current mean of each slot, the unfinished step included; NaN where nothing is known."""
        calls = self._open_calls[slots]
        weight = np.where(calls > 0, 1.0, 0.0)
        n = self.n_units[slots] + weight
        with np.errstate(invalid="ignore", divide="ignore"):
            unit = np.where(calls > 0, self._open_sum[slots] / np.maximum(calls, 1), 0.0)
            centre: Floats = (self.mean[slots] * self.n_units[slots] + unit * weight) / n
        return centre

    def log_us(self, slot: int) -> float:
        """Best current mean of one slot; NaN where nothing is known."""
        n_open = int(self._open_calls[slot])
        n_units = int(self.n_units[slot])
        if not n_open:
            return float(self.mean[slot]) if n_units else float("nan")
        unit = float(self._open_sum[slot]) / n_open
        return (float(self.mean[slot]) * n_units + unit) / (n_units + 1)

    def units(self, slot: int) -> float:
        """Units behind `centre`, the unfinished step included."""
        return float(self.n_units[slot] + (self._open_calls[slot] > 0))

    def sigma(self, keys: Ints) -> Floats:
        """Noise (log) of one unit at each key index, shrunk towards the job's noise, shape [n]."""
        dof, total = self._pooled
        overall = (PRIOR_UNITS * PRIOR_SIGMA**2 + total) / (PRIOR_UNITS + dof)
        own_dof, own = self._key_dof[keys], self._key_spread[keys]
        result: Floats = np.sqrt((PRIOR_UNITS * overall + own) / (PRIOR_UNITS + own_dof))
        return result

    def contrast(self, first: int, second: int) -> Contrast:
        """By how much (log) the second slot of a key is faster than the first."""
        key = int(self.key[first])
        noise = self.noise.noise
        if noise != NONE:
            return self.noise.contrast(self.history, key, first, second, noise)
        n_first, n_second = self.units(first), self.units(second)
        pairs = n_first * n_second / (n_first + n_second) if n_first and n_second else 0.0
        gain = self.log_us(first) - self.log_us(second)
        return Contrast(gain, pairs, float(self.sigma(np.array([key]))[0]))

    def n_th_window(self, slot: int) -> int:
        """Number, from 1, of the set of units by which a slot's key is compared.

        Where neighbouring steps are alike, older units are forgotten, and each new set is a new chance to be lucky.
        """
        if self.noise.noise == NONE:
            return 1
        return 1 + int(self.history.n_units[self.key[slot]]) // DEPTH

    def agrees_nearby(self, first: int, second: int, gain: float) -> bool:
        """Whether neighbouring steps show the gain, too: see `NoiseModel.agrees`.

        Args:
            first: slot.
            second: slot of the same key.
            gain: of the second over the first (log).

        Returns:
            True if they show a good part of it.
        """
        return self.noise.agrees(self.history, int(self.key[first]), first, second, gain)

    def call_sigma(self, slots: Ints) -> Floats:
        """Noise (log) of single calls in each slot, shrunk towards the job's noise, shape [n]."""
        dof, total = self._pooled_calls
        overall = (PRIOR_UNITS * PRIOR_SIGMA**2 + total) / (PRIOR_UNITS + dof)
        own_dof = np.maximum(self._call_dof[slots], 0.0)
        own: Floats = np.sqrt((8.0 * overall + self._call_spread[slots]) / (8.0 + own_dof))
        return own

    def _learn_call_noise(self, touched: Ints, of: Ints, deviation: Floats) -> None:
        known = self.n_units[touched] >= 2
        if not known.any():
            return
        counts = np.bincount(of)[known]
        squares = np.bincount(of, deviation**2)[known]
        slots = touched[known]
        fade = np.where(self._call_dof[slots] > CALL_MEMORY, 0.5, 1.0)
        self._call_dof[slots] = self._call_dof[slots] * fade + counts
        self._call_spread[slots] = self._call_spread[slots] * fade + squares
        dof, total = self._pooled_calls
        fade_all = 0.5 if dof > 100 * CALL_MEMORY else 1.0
        self._pooled_calls = (dof * fade_all + int(counts.sum()), total * fade_all + float(squares.sum()))

    def _typical(self) -> float:
        dof, total = self._pooled
        return math.sqrt((PRIOR_UNITS * PRIOR_SIGMA**2 + total) / (PRIOR_UNITS + dof))

    def _add_step(self, step: int, slots: Ints, counts: Ints, sums: Floats, centre: Floats) -> None:
        """One step's calls of distinct slots: how many each, and the sum of their deviations from `centre`."""
        self._newest_step = max(self._newest_step, step)
        keys, first = np.unique(self.key[slots], return_index=True)
        self.history.add(keys, slots[first], step, counts[first], (centre + sums / counts)[first])
        stale = (self._open_calls[slots] > 0) & (self._open_step[slots] != step)
        if stale.all():
            self._close(slots)
        elif stale.any():
            self._close(slots[stale])
        self._open_step[slots] = step
        self._open_calls[slots] += counts
        self._open_sum[slots] += sums + counts * centre
        self.n_calls[slots] += counts

    def _close(self, slots: Ints) -> None:
        keys = self.key[slots]
        unit = self._open_sum[slots] / self._open_calls[slots]
        self._open_calls[slots] = 0
        self._open_sum[slots] = 0.0
        n = self.n_units[slots] + 1
        kept = 1.0 - 1.0 / np.minimum(n, MEMORY)
        delta = unit - self.mean[slots]
        gained = delta**2 * kept
        self.mean[slots] += delta * (1.0 - kept)
        self.spread[slots] = self.spread[slots] * np.where(n > MEMORY, kept, 1.0) + gained
        self.n_units[slots] = np.minimum(n, MEMORY)
        is_dof = n > 1
        np.add.at(self._key_dof, keys, is_dof.astype(np.float64))
        np.add.at(self._key_spread, keys, gained)
        if (full := np.unique(keys[self._key_dof[keys] > 4 * MEMORY])).size:
            self._key_dof[full] = 0.5 * self._key_dof[full]
            self._key_spread[full] = 0.5 * self._key_spread[full]
        dof, total = self._pooled
        dof, total = dof + int(is_dof.sum()), total + float(gained.sum())
        if dof > 4000.0:
            dof, total = dof / 2, total / 2
        self._pooled = (dof, total)


def grouped(ids: Ints, n_ids: int) -> tuple[Ints, Ints]:
    """The distinct `ids` (in 0..n_ids-1) in order, and each entry's place among them; without sorting."""
    is_there = np.zeros(n_ids, np.bool_)
    is_there[ids] = True
    touched = np.flatnonzero(is_there)
    place = np.empty(n_ids, np.int64)
    place[touched] = np.arange(len(touched))
    return touched, place[ids]


def _totals(groups: Ints, values: Floats, n_groups: int) -> tuple[Ints, Floats]:
    """How many values each group has, and their sum."""
    counts = np.bincount(groups, minlength=n_groups).astype(np.int64)
    return counts, np.asarray(np.bincount(groups, values, minlength=n_groups), np.float64)


def group_median(groups: Ints, values: Floats) -> Floats:
    """Median of `values` within each group, for every entry."""
    order = np.lexsort((values, groups))
    ordered = groups[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    lengths = np.diff(np.r_[starts, len(ordered)])
    medians = values[order][starts + (lengths - 1) // 2]
    result = np.empty_like(values)
    result[order] = np.repeat(medians, lengths)
    return result


def radius(n_first: float, n_second: float, sigma: float, alpha: float) -> float:
    """Half width of an always-valid confidence interval of the difference of two means.

    A normal-mixture confidence sequence (Robbins 1970; Howard et al. 2021) at the harmonic number of
    pairs: it may be looked at after every unit, the total chance of ever being wrong stays below `alpha`.

    Args:
        n_first: units behind the first mean.
        n_second: units behind the second mean.
        sigma: standard deviation of one unit.
        alpha: total probability of being wrong, 0 to 1.

    Returns:
        In the unit of `sigma`; infinite where one mean is not known.
    """
    if n_first <= 0 or n_second <= 0:
        return float("inf")
    return radius_of_pairs(n_first * n_second / (n_first + n_second), sigma, alpha)


def radius_of_pairs(pairs: float, sigma: float, alpha: float) -> float:
    """As `radius`, where the difference is known as well as from this many pairs.

    Args:
        pairs: number of pairs, with a fraction.
        sigma: standard deviation of one unit.
        alpha: total probability of being wrong, 0 to 1.

    Returns:
        Half width, in the unit of `sigma`; infinite without pairs.
    """
    if pairs <= 0.0:
        return math.inf
    grown = pairs * _MIXTURE + 1.0
    return float(sigma * np.sqrt(grown / (pairs**2 * _MIXTURE) * 2.0 * np.log(np.sqrt(grown) / alpha)))


_MIXTURE = 0.5  # tightest near six pairs, where most promotions are decided
