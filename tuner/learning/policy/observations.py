"""This job's measurements as flat arrays, one *slot* per (key, candidate), and comparisons of slots.

Durations enter as natural logs. One step's calls of a slot share that step's noise, so the unit of evidence is the
*step mean*, not the call: a hundred calls of one bad step count once. Single calls are first clipped around the slot's
running centre, so that a straggler moves a mean by little.

Neighbouring steps share noise, too, as congestion comes and goes. Settings that ran at different times then differ by
the state of the network. So a gain that seems proven is compared a second time, over the newest steps in which one of
the two settings followed the other.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from ....store.records import Candidate
from ...modeling.features import Floats, Ints, cell_of

AT_ONCE: Final = 48
"""Most settings, keys or sizes in one look, to bound its time; the others wait for the next look."""
KEPT: Final = 1024
"""Most entries that wait for their counterpart or may be needed again: bounds memory."""
ENOUGH: Final = 3
"""This many observations show what is usual; this many in a row are no accident."""
HORIZON_STEPS: Final = 100
"""Steps after which evidence is out of date and a wait ends; also the first cooldown's length."""
PRIOR_UNITS: Final = 4.0
PRIOR_SIGMA: Final = 0.04
"""Noise (log) before the first measurement; its weight is `PRIOR_UNITS` units."""
LEAST_NOISE: Final = 0.01
"""Least noise (log) of calls, because of the clock's resolution; also the first estimate of steps' noise."""
MEMORY: Final = 160
"""Units after which older ones fade, so that slow drift is followed."""
CLIP: Final = 4.0
"""Calls and units are clipped to this many noise scales around their centre."""
DEPTH: Final = 64
"""Newest units of each key for the second comparison, that of neighbouring steps."""
NEIGHBOURS: Final = 8
"""Neighbouring steps that are assumed to share the state of the network."""
MIN_GAIN: Final = 0.005
"""Least gain (log) that is worth a promotion."""
_MIXTURE: Final = 0.5
"""The confidence sequence's mixture: it is tightest near six pairs, where most promotions are decided."""


class Columns:
    """Arrays that grow together along their first axis; new entries are zeros."""

    def make_room(self, n: int) -> None:
        """Let every array have at least `n` entries."""
        for name, old in vars(self).items():
            if isinstance(old, np.ndarray) and len(old) < n:
                more = max(n, 2 * len(old), 64) - len(old)
                setattr(self, name, np.concatenate([old, np.zeros((more, *old.shape[1:]), old.dtype)]))


class StepSums(dict[int, float]):
    """Sums by step, of the last `KEPT` steps."""

    def add(self, steps: Ints, values: Floats | Ints) -> None:
        """Add each value to its step's sum."""
        distinct, of = np.unique(steps, return_inverse=True)
        for step, total in zip(distinct.tolist(), np.bincount(of, values).tolist(), strict=True):
            self[step] = self.get(step, 0.0) + total
        while len(self) > KEPT:
            del self[next(iter(self))]


class _NoiseScale(Columns):
    """Standard deviation (log) by index, shrunk towards that over all indices; older deviations fade."""

    def __init__(self) -> None:
        self._dof = np.zeros(0)
        self._squares = np.zeros(0)
        self._all = 0.0, 0.0

    @property
    def typical(self) -> float:
        """The standard deviation over all indices."""
        dof, squares = self._all
        return math.sqrt((PRIOR_UNITS * PRIOR_SIGMA**2 + squares) / (PRIOR_UNITS + dof))

    def of(self, at: Ints | int) -> Floats:
        """The standard deviation at each of these indices, shape [n], or at one; the arrays must be long enough."""
        prior = PRIOR_UNITS * self.typical**2
        result: Floats = np.sqrt((prior + self._squares[at]) / (PRIOR_UNITS + self._dof[at]))
        return result

    def add(self, at: Ints, dof: Floats, squares: Floats) -> None:
        """Take in sums of squared deviations and their degrees of freedom; several indices may be the same."""
        np.add.at(self._dof, at, dof)
        np.add.at(self._squares, at, squares)
        full = at[self._dof[at] > 4 * MEMORY]
        if len(full):
            full = np.unique(full)
            self._dof[full] *= 0.5
            self._squares[full] *= 0.5
        kept = 0.5 if self._all[0] > 40 * MEMORY else 1.0
        self._all = kept * self._all[0] + float(dof.sum()), kept * self._all[1] + float(squares.sum())


class UnitHistory(Columns):
    """The newest `DEPTH` units of every key."""

    def __init__(self) -> None:
        self._slots = np.zeros((0, DEPTH), np.int64)
        self._values = np.zeros((0, DEPTH))
        self._n_units = np.zeros(0, np.int64)

    def add(self, keys: Ints, slots: Ints, values: Floats) -> None:
        """Take in one unit of each of these distinct keys: the slot that ran, and its mean log duration."""
        self.make_room(int(keys.max()) + 1)
        at = self._n_units[keys] % DEPTH
        self._slots[keys, at], self._values[keys, at] = slots, values
        self._n_units[keys] += 1

    def forget(self, keys: Ints, slots: Ints) -> None:
        """Leave the units of these slots (one of each key) out of comparisons from now on."""
        self._slots[keys] = np.where(self._slots[keys] == slots[:, None], -1, self._slots[keys])

    def of(self, key: int) -> tuple[Ints, Floats]:
        """Slots and mean log durations of the newest units of one key, oldest first."""
        self.make_room(key + 1)
        n = int(self._n_units[key])
        order = np.arange(n - DEPTH, n) % DEPTH if n > DEPTH else slice(n)
        return self._slots[key, order], self._values[key, order]


FALSE_PROMOTION: Final = 0.01
"""Probability of any false promotion at one key, or of a variant of the plan."""
VERIFIED: Final = 0.2
"""Error level of second comparisons: of this job with earlier jobs, and of neighbouring steps with all steps."""


def level_of(n_th: int) -> float:
    """Error level of the n-th trial, from 1 on; the levels of all trials sum to FALSE_PROMOTION at most."""
    return FALSE_PROMOTION / (n_th * (n_th + 1))


class Contrast(NamedTuple):
    """By how much (log) one setting is faster than another, by calls or by steps, and how certain that is."""

    gain: float
    pairs: float
    """Equivalent number of pairs of independent units: nm / (n + m) for n units of the first and m of the second; 0 if
    nothing is known.
    """
    sigma: float
    """Standard deviation (log) of one unit."""

    def radius(self, alpha: float) -> float:
        """Half width (log) of an always-valid confidence interval of the gain; infinite if nothing is known.

        A normal-mixture confidence sequence (Robbins 1970; Howard et al. 2021): even if it is checked after every unit,
        the total error probability stays below `alpha`.
        """
        if self.pairs <= 0.0:
            return math.inf
        grown = self.pairs * _MIXTURE + 1.0
        return self.sigma * math.sqrt(2.0 * grown * math.log(math.sqrt(grown) / alpha) / _MIXTURE) / self.pairs

    def is_proven(self, alpha: float, least: float) -> bool:
        """Whether the gain is beyond doubt, and more than `least`."""
        return self.gain > max(self.radius(alpha), least)


def contrast_of(gain: float, std: float, sigma: float) -> Contrast:
    """The contrast that has this gain and standard deviation (log); `sigma` is that of one unit."""
    return Contrast(gain, (sigma / std) ** 2, sigma)


class Calls(NamedTuple):
    """Calls grouped by slot: the distinct slots, each call's index among them, centres, deviations from them."""

    slots: Ints
    of: Ints
    centre: Floats
    deviation: Floats


class CallEvidence(Columns):
    """Running statistics of all slots in one regime; `regime` is its label, 0 for the job's first."""

    def __init__(self, regime: int = 0) -> None:
        self.regime = regime
        self.history = UnitHistory()
        self._index: dict[tuple[int, Candidate], int] = {}
        self.candidates: list[Candidate] = []
        self.key = np.zeros(0, np.int64)
        self.algorithm = np.zeros(0, np.int64)
        """The requested algorithm, 255 if NCCL chooses; `protocol` likewise."""
        self.protocol = np.zeros(0, np.int64)
        self.chunk_bytes = np.zeros(0, np.int64)
        self.n_calls = np.zeros(0, np.int64)
        self.n_units = np.zeros(0, np.int64)
        self.mean = np.zeros(0)
        """Mean (log us) of the units."""
        self.extra_us = np.zeros(0)
        """Measured microseconds over the incumbent, signed, while the slot was on trial."""
        self._open_step = np.zeros(0, np.int64)
        self._open_calls = np.zeros(0, np.int64)
        self._open_sum = np.zeros(0)
        self._of_units = _NoiseScale()
        """Noise of units, by key."""
        self.of_calls = _NoiseScale()
        """Noise of single calls, by slot."""

    def __len__(self) -> int:
        return len(self.candidates)

    def find(self, key: int, candidate: Candidate) -> int | None:
        """Slot of `candidate` at key index `key`; None if it has none."""
        return self._index.get((key, candidate))

    def has_measured(self, key: int, candidate: Candidate) -> bool:
        """Whether a call of `candidate` at key index `key` was measured."""
        slot = self.find(key, candidate)
        return slot is not None and self.n_calls.item(slot) > 0

    def slot(self, key: int, candidate: Candidate) -> int:
        """Slot of `candidate` at key index `key`; a new one if it has none."""
        if (found := self._index.get((key, candidate))) is None:
            found = self._index[key, candidate] = len(self)
            self.candidates.append(candidate)
            if max(found, key) >= len(self.key):
                for one in (self, self._of_units, self.of_calls):
                    one.make_room(max(found, key) + 1)
            self.key[found] = key
            self.algorithm[found], self.protocol[found] = cell_of(candidate)
            self.chunk_bytes[found] = candidate.chunk_bytes
        return found

    def forget(self, slots: Ints) -> None:
        """Forget the duration of the only call of each of these slots."""
        for one in (self.n_calls, self.n_units, self._open_calls, self._open_sum, self.mean):
            one[slots] = 0
        self.history.forget(self.key[slots], slots)

    def calls(self, slots: Ints, logs: Floats) -> Calls:
        """Group calls by slot and compare each with its slot's centre; there must be at least one call."""
        touched, of = grouped(slots, len(self))
        centre = self.centre(touched)
        if (fresh := np.isnan(centre)).any():
            centre = np.where(fresh, _medians(of, logs), centre)
        return Calls(touched, of, centre, logs - centre[of])

    def add(self, calls: Calls, steps: Ints) -> None:
        """Take in calls of `steps`, in the order they happened."""
        slots, of = calls.slots, calls.of
        limit = CLIP * self._of_units.typical
        # A slot without history is compared with the block's median only: its limits are wider.
        is_ripe = self.n_units[slots] >= 2
        limits = np.where(is_ripe, limit, 4 * limit)[of]
        deviation = np.minimum(np.maximum(calls.deviation, -limits), limits)
        if is_ripe.any():
            counts, squares = _totals(of, deviation**2, len(slots))
            self.of_calls.add(slots[is_ripe], counts[is_ripe].astype(np.float64), squares[is_ripe])
        for step in sorted(set(steps.tolist())):
            here = steps == step
            counts, sums = _totals(of[here], deviation[here], len(slots))
            there = counts > 0
            self._add_step(step, slots[there], counts[there], sums[there], calls.centre[there])

    def centre(self, slots: Ints) -> Floats:
        """Best current mean of each slot, including the unfinished step; NaN if nothing is known."""
        calls, n_units = self._open_calls[slots], self.n_units[slots]
        is_open = calls > 0
        unit = self._open_sum[slots] / np.maximum(calls, 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            centre: Floats = (self.mean[slots] * n_units + unit * is_open) / (n_units + is_open)
        return centre

    def log_us(self, slot: int) -> float:
        """Best current mean of one slot; NaN if nothing is known."""
        n_open, n_units, mean = self._open_calls.item(slot), self.n_units.item(slot), self.mean.item(slot)
        if not n_open:
            return mean if n_units else math.nan
        return (mean * n_units + self._open_sum.item(slot) / n_open) / (n_units + 1)

    def known_log_us(self, key: int, candidate: Candidate) -> float:
        """Best current mean of `candidate` at key index `key`; NaN if nothing is known."""
        slot = self.find(key, candidate)
        return math.nan if slot is None else self.log_us(slot)

    def units(self, slot: int) -> float:
        """Units behind `centre`, including the unfinished step."""
        return float(self.n_units.item(slot) + (self._open_calls.item(slot) > 0))

    def sigma(self, keys: Ints | int) -> Floats:
        """Noise (log) of one unit at each key index (shape [n]) or at one, shrunk towards the job's noise."""
        return self._of_units.of(keys)

    def contrast(self, first: int, second: int) -> Contrast:
        """By how much (log) the second slot of a key is faster than the first."""
        n_first, n_second = self.units(first), self.units(second)
        pairs = n_first * n_second / (n_first + n_second) if n_first and n_second else 0.0
        gain = self.log_us(first) - self.log_us(second)
        return Contrast(gain, pairs, float(self.sigma(int(self.key[first]))))

    def nearby(self, first: int, second: int) -> Contrast:
        """The same from the steps around switches between the two: elsewhere the network may have differed.

        Nothing is known before one of them has run both before and after the other. At each switch `NEIGHBOURS` steps
        of both count; a step may count at two switches.
        """
        (slots, values), sigma = self.history.of(int(self.key[first])), float(self.sigma(int(self.key[first])))
        is_either = (slots == first) | (slots == second)
        is_first, values = (slots == first)[is_either], values[is_either]
        switches = np.flatnonzero(is_first[1:] != is_first[:-1]) + 1
        if len(switches) < 2:
            return Contrast(0.0, 0.0, sigma)
        ends, logs = [0, *switches.tolist(), len(values)], values.tolist()
        sides = [(logs[start:end][:NEIGHBOURS], logs[start:end][-NEIGHBOURS:]) for start, end in pairwise(ends)]
        pairs = np.array([len(one) * len(two) / (len(one) + len(two)) for (_, one), (two, _) in pairwise(sides)])
        gains = np.array([sum(one) / len(one) - sum(two) / len(two) for (_, one), (two, _) in pairwise(sides)])
        gains *= np.where(is_first[switches], -1.0, 1.0)
        gain = float(pairs @ gains / pairs.sum())
        squares = PRIOR_UNITS * sigma**2 + float(pairs @ (gains - gain) ** 2)
        return Contrast(gain, 0.5 * float(pairs.sum()), math.sqrt(squares / (PRIOR_UNITS + len(switches) - 1)))

    def _add_step(self, step: int, slots: Ints, counts: Ints, sums: Floats, centre: Floats) -> None:
        """Take in one step's calls of distinct slots: their number, and the sum of their deviations from `centre`."""
        keys, first = np.unique(self.key[slots], return_index=True)
        self.history.add(keys, slots[first], (centre + sums / counts)[first])
        stale = (self._open_calls[slots] > 0) & (self._open_step[slots] != step)
        if stale.any():
            self._close(slots[stale])
        self._open_step[slots] = step
        self._open_calls[slots] += counts
        self._open_sum[slots] += sums + counts * centre
        self.n_calls[slots] += counts

    def _close(self, slots: Ints) -> None:
        unit = self._open_sum[slots] / self._open_calls[slots]
        self._open_calls[slots] = 0
        self._open_sum[slots] = 0.0
        n = self.n_units[slots] + 1
        weight = 1.0 / np.minimum(n, MEMORY)
        delta = unit - self.mean[slots]
        self.mean[slots] += delta * weight
        self.n_units[slots] = np.minimum(n, MEMORY)
        self._of_units.add(self.key[slots], (n > 1).astype(np.float64), delta**2 * (1.0 - weight))


def grouped(ids: Ints, n_ids: int) -> tuple[Ints, Ints]:
    """The distinct `ids` (in 0..n_ids-1) in order, and each entry's index among them; without sorting."""
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


def _medians(groups: Ints, values: Floats) -> Floats:
    """The lower median of each group; none is empty."""
    lengths = np.bincount(groups)
    medians: Floats = values[np.lexsort((values, groups))][np.cumsum(lengths) - lengths + (lengths - 1) // 2]
    return medians
