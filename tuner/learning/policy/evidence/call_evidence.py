"""What this job measured, as flat arrays: one *slot* per (key, candidate).

Durations enter as natural logs. One training step's calls of a slot share whatever that step suffered, so
the unit of evidence is the *step mean*, not the call: a hundred calls of one bad step count once. Single
calls are clipped around the slot's running centre first, so that a straggler moves a mean by little.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zerotune.store.records import Candidate
from zerotune.tuner.learning.policy.evidence.serial_noise import (
    DEPTH,
    NONE,
    PRIOR_SIGMA,
    PRIOR_UNITS,
    Contrast,
    NoiseModel,
    UnitHistory,
)
from zerotune.tuner.modeling.features import cell_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

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

    def __init__(self, noise: NoiseModel | None = None) -> None:
        self.noise = noise or NoiseModel()
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
