"""What this job measured, as flat arrays: one *slot* per (key, candidate); and by how much one is faster than another.

Durations enter as natural logs. One training step's calls of a slot share whatever that step suffered, so the unit of
evidence is the *step mean*, not the call: a hundred calls of one bad step count once. Single calls are clipped around
the slot's running centre first, so that a straggler moves a mean by little.

Neighbouring steps share noise, too: congestion that comes and goes, a neighbour's bursts. Then settings that ran at
different times differ by what the network did meanwhile. So what seems proven is compared a second time, over the
newest steps in which one of the two followed the other.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from ....store.records import Candidate
from ...modeling.features import Floats, Ints, cell_of

AT_ONCE: Final = 48
"""Settings, keys or sizes that one look deals with at most, as others may wait for the next: bounds its time."""
KEPT: Final = 1024
"""Of what waits for its counterpart, or may be asked for again: bounds memory."""
ENOUGH: Final = 3
"""So many observations say what is usual; so many in a row are no accident."""
HORIZON_STEPS: Final = 100
"""What steps of so long ago said is asked anew; who waits, waits no longer; a cooldown lasts as long at first."""
PRIOR_UNITS: Final = 4.0
PRIOR_SIGMA: Final = 0.04
"""Noise (log) before anything is known, and how many units that opinion weighs."""
LEAST_NOISE: Final = 0.01
"""Noise (log) of calls is believed to be no less, as clocks tick; of steps as much, before anything is known."""
MEMORY: Final = 160
"""Units after which older ones fade, so that slow drift is followed."""
CLIP: Final = 4.0
"""What is further from its centre than this many noise scales is pulled in: calls, and what is compared of them."""
DEPTH: Final = 64
"""Units of each key that are compared once more as neighbours."""
NEIGHBOURS: Final = 8
"""Steps next to one another that are taken to share what the network does."""
MIN_GAIN: Final = 0.005
"""Less (log) is not worth having."""
_MIXTURE: Final = 0.5
"""Of the confidence sequence: tightest near six pairs, where most promotions are decided."""


class Columns:
    """Arrays that grow together: one place per index along their first axis, new ones hold zeros."""

    def make_room(self, n: int) -> None:
        """Let every array have at least `n` places."""
        for name, old in vars(self).items():
            if isinstance(old, np.ndarray) and len(old) < n:
                more = max(n, 2 * len(old), 64) - len(old)
                setattr(self, name, np.concatenate([old, np.zeros((more, *old.shape[1:]), old.dtype)]))


class StepSums(dict[int, float]):
    """Sums by step, as many as are KEPT."""

    def add(self, steps: Ints, values: Floats | Ints) -> None:
        """Take in values, each of its step."""
        distinct, of = np.unique(steps, return_inverse=True)
        for step, total in zip(distinct.tolist(), np.bincount(of, values).tolist(), strict=True):
            self[step] = self.get(step, 0.0) + total
        while len(self) > KEPT:
            del self[next(iter(self))]


class _NoiseScale(Columns):
    """Standard deviation (log) by index, shrunk towards that of all; older deviations fade."""

    def __init__(self) -> None:
        self._dof = np.zeros(0)
        self._squares = np.zeros(0)
        self._all = 0.0, 0.0

    @property
    def typical(self) -> float:
        """Over all indices."""
        dof, squares = self._all
        return math.sqrt((PRIOR_UNITS * PRIOR_SIGMA**2 + squares) / (PRIOR_UNITS + dof))

    def of(self, at: Ints | int) -> Floats:
        """At each of these indices, for which there is room, shape [n]; or at one."""
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
        """Take in a unit of each of some keys.

        Args:
            keys: distinct key indices, shape [n].
            slots: that ran, one of each key, shape [n].
            values: their mean log duration, shape [n].
        """
        self.make_room(int(keys.max()) + 1)
        at = self._n_units[keys] % DEPTH
        self._slots[keys, at], self._values[keys, at] = slots, values
        self._n_units[keys] += 1

    def forget(self, keys: Ints, slots: Ints) -> None:
        """What these slots (one of each key) measured so far is compared with nothing."""
        self._slots[keys] = np.where(self._slots[keys] == slots[:, None], -1, self._slots[keys])

    def of(self, key: int) -> tuple[Ints, Floats]:
        """Slots and mean log durations of the newest units of one key, oldest first."""
        self.make_room(key + 1)
        n = int(self._n_units[key])
        order = np.arange(n - DEPTH, n) % DEPTH if n > DEPTH else slice(n)
        return self._slots[key, order], self._values[key, order]


FALSE_PROMOTION: Final = 0.01
"""Probability that any of what is tried at a key, or for the whole plan, is proven and is not so."""
VERIFIED: Final = 0.2
"""Probability that a second opinion is wrong: this job's on what earlier jobs proved, neighbours' on what is proven."""


def level_of(n_th: int) -> float:
    """Error level of the n-th that is tried, from 1 on: all of them together err with FALSE_PROMOTION at most."""
    return FALSE_PROMOTION / (n_th * (n_th + 1))


class Contrast(NamedTuple):
    """By how much (log) one setting is faster than another, by calls or by steps, and how well that is known."""

    gain: float
    pairs: float
    """Number of pairs of independent units that would say as much, n first and m second ones nm / (n + m); 0 where
    nothing is known.
    """
    sigma: float
    """Standard deviation (log) of such a unit."""

    def radius(self, alpha: float) -> float:
        """Half width (log) of an always-valid confidence interval of the gain; infinite where nothing is known.

        A normal-mixture confidence sequence (Robbins 1970; Howard et al. 2021): it may be looked at after every unit,
        the total chance of ever being wrong stays below `alpha`.
        """
        if self.pairs <= 0.0:
            return math.inf
        grown = self.pairs * _MIXTURE + 1.0
        return self.sigma * math.sqrt(2.0 * grown * math.log(math.sqrt(grown) / alpha) / _MIXTURE) / self.pairs

    def is_proven(self, alpha: float, least: float) -> bool:
        """Whether the gain is beyond doubt, and more than `least`."""
        return self.gain > max(self.radius(alpha), least)


def contrast_of(gain: float, std: float, sigma: float) -> Contrast:
    """What is known by its standard deviation (log), beside that of a single unit."""
    return Contrast(gain, (sigma / std) ** 2, sigma)


class Calls(NamedTuple):
    """Calls grouped by slot: the distinct slots, each call's place among them, centres, deviations from them."""

    slots: Ints
    of: Ints
    centre: Floats
    deviation: Floats


class CallEvidence(Columns):
    """Running statistics of all slots of one regime, whose label this is; 0 is the one that the job began with."""

    def __init__(self, regime: int = 0) -> None:
        self.regime = regime
        self.history = UnitHistory()
        self._index: dict[tuple[int, Candidate], int] = {}
        self.candidates: list[Candidate] = []
        self.key = np.zeros(0, np.int64)
        self.algorithm = np.zeros(0, np.int64)
        """That is asked for, 255 where the choice is NCCL's; so is the protocol."""
        self.protocol = np.zeros(0, np.int64)
        self.n_calls = np.zeros(0, np.int64)
        self.n_units = np.zeros(0, np.int64)
        self.mean = np.zeros(0)
        """Of the units."""
        self.extra_us = np.zeros(0)
        """Measured microseconds over the incumbent, signed, while the slot was on trial."""
        self._open_step = np.zeros(0, np.int64)
        self._open_calls = np.zeros(0, np.int64)
        self._open_sum = np.zeros(0)
        self._of_units = _NoiseScale()
        """Noise by key."""
        self.of_calls = _NoiseScale()
        """Noise of single calls, by slot."""

    def __len__(self) -> int:
        return len(self.candidates)

    def find(self, key: int, candidate: Candidate) -> int | None:
        """Slot of `candidate` at key index `key`, None when it was never made."""
        return self._index.get((key, candidate))

    def has_measured(self, key: int, candidate: Candidate) -> bool:
        """Whether a call of `candidate` at key index `key` was measured."""
        slot = self.find(key, candidate)
        return slot is not None and self.n_calls.item(slot) > 0

    def slot(self, key: int, candidate: Candidate) -> int:
        """Slot of `candidate` at key index `key`, made if need be."""
        if (found := self._index.get((key, candidate))) is None:
            found = self._index[key, candidate] = len(self)
            self.candidates.append(candidate)
            if max(found, key) >= len(self.key):
                for one in (self, self._of_units, self.of_calls):
                    one.make_room(max(found, key) + 1)
            self.key[found] = key
            self.algorithm[found], self.protocol[found] = cell_of(candidate)
        return found

    def forget(self, slots: Ints) -> None:
        """What the only call of each of these slots took says nothing."""
        for one in (self.n_calls, self.n_units, self._open_calls, self._open_sum, self.mean):
            one[slots] = 0
        self.history.forget(self.key[slots], slots)

    def calls(self, slots: Ints, logs: Floats) -> Calls:
        """Calls grouped by slot, against what each slot took so far; slot and log duration of each, at least one."""
        touched, of = grouped(slots, len(self))
        centre = self.centre(touched)
        if (fresh := np.isnan(centre)).any():
            centre = np.where(fresh, _medians(of, logs), centre)
        return Calls(touched, of, centre, logs - centre[of])

    def add(self, calls: Calls, steps: Ints) -> None:
        """Take in calls of `steps`, in the order they happened."""
        slots, of = calls.slots, calls.of
        limit = CLIP * self._of_units.typical
        # A slot without history has only the block's median to go by: be generous there.
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
        """Best current mean of each slot, the unfinished step included; NaN where nothing is known."""
        calls, n_units = self._open_calls[slots], self.n_units[slots]
        is_open = calls > 0
        unit = self._open_sum[slots] / np.maximum(calls, 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            centre: Floats = (self.mean[slots] * n_units + unit * is_open) / (n_units + is_open)
        return centre

    def log_us(self, slot: int) -> float:
        """Best current mean of one slot; NaN where nothing is known."""
        n_open, n_units, mean = self._open_calls.item(slot), self.n_units.item(slot), self.mean.item(slot)
        if not n_open:
            return mean if n_units else math.nan
        return (mean * n_units + self._open_sum.item(slot) / n_open) / (n_units + 1)

    def known_log_us(self, key: int, candidate: Candidate) -> float:
        """Best current mean of `candidate` at key index `key`; NaN where nothing is known."""
        slot = self.find(key, candidate)
        return math.nan if slot is None else self.log_us(slot)

    def units(self, slot: int) -> float:
        """Units behind `centre`, the unfinished step included."""
        return float(self.n_units.item(slot) + (self._open_calls.item(slot) > 0))

    def sigma(self, keys: Ints | int) -> Floats:
        """Noise (log) of one unit at each key index, shrunk towards the job's noise, shape [n]; or at one."""
        return self._of_units.of(keys)

    def contrast(self, first: int, second: int) -> Contrast:
        """By how much (log) the second slot of a key is faster than the first."""
        n_first, n_second = self.units(first), self.units(second)
        pairs = n_first * n_second / (n_first + n_second) if n_first and n_second else 0.0
        gain = self.log_us(first) - self.log_us(second)
        return Contrast(gain, pairs, float(self.sigma(int(self.key[first]))))

    def nearby(self, first: int, second: int) -> Contrast:
        """The same where one of the two took over from the other: the network may have changed just as the second ran.

        Of which nothing is known before either has run on both sides of the other. At each switch so many steps of both
        count; each of them counts at two switches.
        """
        (slots, values), sigma = self.history.of(int(self.key[first])), float(self.sigma(int(self.key[first])))
        is_ours = (slots == first) | (slots == second)
        is_first, values = (slots == first)[is_ours], values[is_ours]
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
        """One step's calls of distinct slots: how many each, and the sum of their deviations from `centre`."""
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


def _medians(groups: Ints, values: Floats) -> Floats:
    """The lower median of each group; none is empty."""
    lengths = np.bincount(groups)
    medians: Floats = values[np.lexsort((values, groups))][np.cumsum(lengths) - lengths + (lengths - 1) // 2]
    return medians
