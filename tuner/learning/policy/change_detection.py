"""Noticing that the network is not what it was: congestion, a neighbour's job, a recovered link.

What runs is compared with what it used to take. A step's calls of one key share whatever the step suffered, so their
mean is the unit; and where one step is like the one before, as in congestion that comes and goes by itself, only what
is new in each counts (it is whitened by the correlation of neighbouring steps). These units are standardised, clipped
and summed two-sidedly (Page-Hinkley): per key, and once more for all keys of a step together. Old regimes keep their
evidence under a label; when measurements fit one of them again, it is taken back instead of learned anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zerotune.tuner.learning.policy.choice import MAX_REGIMES
from zerotune.tuner.learning.policy.observations import CallEvidence, NoiseModel

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ALLOWANCE: Final = 0.5
LIMIT: Final = 12.0
CLIP: Final = 4.0
MIN_UNITS: Final = 3
BEYOND: Final = 2.0
"""Units beyond this many noise scales are counted: the more often they occur, the less each of them counts."""
BEYOND_WEIGHT: Final = 50.0
"""How many units the opinion weighs that they occur as seldom as `CLIP` supposes."""
BEYOND_MEMORY: Final = 400.0
FADE: Final = 0.7
"""How much less a unit says than the next about how large a change is."""
MIN_SHIFT: Final = 0.03
"""Shifts (log) below this are drift: followed by the running means, not called a change."""
MOST_ALIKE: Final = 0.97
ALIKE_MEMORY: Final = 100.0
"""Steps (of all keys together) after which what neighbours had in common fades."""
ALIKE_WEIGHT: Final = 30.0
"""How many steps the opinion weighs that neighbouring steps have nothing in common."""
MATCH_CALLS: Final = 6
MATCH_WITHIN: Final = 0.08
USUAL: Final = 2.0
"""Units are clipped to this many noise scales where correlation of neighbouring steps is learned: a change of the
network would look like correlation, too, and hide itself.
"""
BACK: Final = 0.25
"""Most of a change, as a share, that may be left over where it is gone."""
TOGETHER_WEIGHT: Final = 10.0
"""How many steps the opinion weighs that all keys of a step say the same."""
_ALL: Final = np.zeros(1, np.int64)
_DIRECTIONS: Final = np.array([[1.0], [-1.0]])


class ChangeDetector:
    """Two-sided sums per key; `reset` when a new regime begins."""

    def __init__(self, limit: float = LIMIT) -> None:
        self._limit = limit
        self._sums = np.zeros((2, 0))
        """By direction (slower, faster) and key, as the next three are, which concern the time since it was zero."""
        self._weight = np.zeros((2, 0))
        self._reached = np.zeros((2, 0))
        """Where residuals lay, summed up, the newer the more."""
        self._beyond = np.zeros((2, 0))
        """By direction and key: units that were far off while nothing seemed to change; `_quiet` counts all of them."""
        self._quiet = np.zeros((2, 0))

    def reset(self) -> None:
        """A new regime began; how noise is distributed is still true."""
        for one in (self._sums, self._weight, self._reached):
            one[:] = 0.0

    def update(self, keys: Ints, standardised: Floats, deviation: Floats) -> Ints:
        """Take in what deviates from what calls used to take.

        Args:
            keys: key index of each residual, shape [n].
            standardised: residuals divided by their noise scale, shape [n].
            deviation: the residuals (log), shape [n].

        Returns:
            Keys that changed, mostly none.
        """
        if not len(keys):
            return keys
        n_keys = int(keys.max()) + 1
        self._grow(n_keys)
        sums, weight, reached = (one[:, :n_keys] for one in (self._sums, self._weight, self._reached))
        counts = np.bincount(keys, minlength=n_keys)
        slower, faster = self._limits(keys, standardised)
        added = np.bincount(keys, np.clip(standardised, -faster, slower), minlength=n_keys)
        sums[:] = np.maximum(0.0, sums + _DIRECTIONS * added - ALLOWANCE * counts)
        fade = FADE**counts
        weight[:] = np.where(sums > 0.0, fade * weight + counts, 0.0)
        reached[:] = np.where(sums > 0.0, fade * reached + np.bincount(keys, deviation, minlength=n_keys), 0.0)
        return np.flatnonzero((sums > self._limit).any(axis=0)).astype(np.int64)

    def _limits(self, keys: Ints, standardised: Floats) -> Floats:
        """How much each unit may count, shape [2, n].

        No more than a log likelihood: how seldom a unit is as far off to that side without any change. Clocks that
        tick coarsely make calls jump by a tick, now and then, to one side only.
        """
        share = (self._beyond[:, keys] + BEYOND_WEIGHT * math.exp(-CLIP)) / (self._quiet[:, keys] + BEYOND_WEIGHT)
        is_quiet = self._sums[:, keys] < 0.5 * self._limit
        side = np.array([[0], [1]])
        np.add.at(self._quiet, (side, keys), is_quiet)
        np.add.at(self._beyond, (side, keys), is_quiet & (_DIRECTIONS * standardised > BEYOND))
        if (full := self._quiet[:, keys] > BEYOND_MEMORY).any():
            old = np.zeros(self._quiet.shape, np.bool_)
            old[:, keys] = full
            self._quiet[old] *= 0.5
            self._beyond[old] *= 0.5
        limits: Floats = np.minimum(CLIP, -np.log(share))
        return limits

    def shift(self, keys: Ints) -> float:
        """By how much (log) these keys have moved: their median."""
        direction = np.argmax(self._sums[:, keys], axis=0)
        weight = np.maximum(self._weight[direction, keys], 1.0)
        return float(np.median(self._reached[direction, keys] / weight))

    def _grow(self, n_keys: int) -> None:
        if (more := n_keys - self._sums.shape[1]) > 0:
            room = np.zeros((2, max(more, self._sums.shape[1], 64)))
            for name in ("_sums", "_weight", "_reached", "_beyond", "_quiet"):
                setattr(self, name, np.concatenate([getattr(self, name), room], axis=1))


class FinishedSteps(NamedTuple):
    """Steps of keys that are done: what is new in each, in noise scales, and how much (log) it deviates."""

    keys: Ints
    new: Floats
    deviation: Floats


class StepMeans:
    """Calls summed up to one unit per key and step; a unit is done when its key's next step begins."""

    def __init__(self) -> None:
        self._step = np.zeros(0, np.int64)
        self._n = np.zeros(0, np.int64)
        self._sum = np.zeros(0)
        self._last = np.zeros(0)
        """The unit before, standardised; NaN where there is none."""
        self._same, self._all = 0.0, ALIKE_WEIGHT

    @property
    def alike(self) -> float:
        """Correlation of neighbouring steps."""
        return min(max(self._same / self._all, 0.0), MOST_ALIKE)

    def reset(self) -> None:
        """A new regime began; how much neighbouring steps have in common is still true."""
        self._n[:] = 0
        self._last[:] = np.nan

    def add(self, keys: Ints, deviation: Floats, step: int, sigma: Callable[[Ints], Floats]) -> FinishedSteps:
        """Take in calls of one step.

        Args:
            keys: key index of each call, shape [n].
            deviation: of each call (log) from what it used to take, shape [n].
            step: the step they all belong to.
            sigma: standard deviation of a unit (log), by key.

        Returns:
            Keys whose unit of the step before is done, and what is new in these units.
        """
        self._grow(int(keys.max()) + 1)
        here = np.unique(keys)
        done = here[(self._step[here] != step) & (self._n[here] > 0)]
        deviation_of = self._sum[done] / self._n[done]
        units = np.clip(deviation_of / sigma(done), -CLIP, CLIP)
        before = self._last[done]
        new = self._whiten(units, before)
        self._last[done] = units
        fresh = here[self._step[here] != step]
        self._step[fresh], self._n[fresh], self._sum[fresh] = step, 0, 0.0
        self._n += np.bincount(keys, minlength=len(self._n))
        self._sum += np.bincount(keys, deviation, minlength=len(self._sum))
        return FinishedSteps(done, new, deviation_of)

    def _whiten(self, units: Floats, before: Floats) -> Floats:
        known = np.isfinite(before)
        alike = self.alike
        new = np.where(known, (units - alike * before) / np.sqrt(1.0 - alike**2), units)
        if known.any():
            fade = 1.0 - 1.0 / ALIKE_MEMORY
            one, other = (np.clip(both[known], -USUAL, USUAL) for both in (units, before))
            self._same = fade * self._same + float(np.mean(one * other))
            self._all = fade * self._all + float(np.mean(0.5 * (one**2 + other**2)))
        result: Floats = new
        return result

    def _grow(self, n_keys: int) -> None:
        more = max(64, 2 * n_keys) - len(self._n) if n_keys > len(self._n) else 0
        if more > 0:
            self._step = np.concatenate([self._step, np.full(more, -1, np.int64)])
            self._n = np.concatenate([self._n, np.zeros(more, np.int64)])
            self._sum = np.concatenate([self._sum, np.zeros(more)])
            self._last = np.concatenate([self._last, np.full(more, np.nan)])


class Together:
    """All keys of a step as one: a network that is slower is so for most of them."""

    def __init__(self) -> None:
        self._changes = ChangeDetector()
        self._square, self._weight = 0.0, 0.0
        """Sum of squares of steps of all keys together, and the weight of the steps in it."""

    def reset(self) -> None:
        """A new regime began; how alike the keys of one step are is still true."""
        self._changes.reset()

    def has_changed(self, units: FinishedSteps) -> bool:
        """Whether the keys of a step deviate beyond doubt."""
        n_keys = len(units.keys)
        if n_keys < 2:
            return False
        pooled = float(units.new.sum()) / math.sqrt(n_keys)
        variance = max(1.0, (TOGETHER_WEIGHT * n_keys + self._square) / (TOGETHER_WEIGHT + self._weight))
        standardised = np.full(1, np.clip(pooled / math.sqrt(variance), -CLIP, CLIP))
        fade = 1.0 - 1.0 / ALIKE_MEMORY
        self._square = fade * self._square + min(pooled**2, CLIP**2 * variance)
        self._weight = fade * self._weight + 1.0
        return bool(len(self._changes.update(_ALL, standardised, standardised)))


class Regimes:
    """The evidence of every regime seen so far, the current one by `evidence`."""

    def __init__(self, max_regimes: int = MAX_REGIMES) -> None:
        self._noise = NoiseModel()
        self._all = [CallEvidence(self._noise)]
        self._max = max_regimes
        self.n_changes = 0
        self._settling = False
        self._shift = 0.0

    @property
    def evidence(self) -> CallEvidence:
        """CallEvidence of the regime in force."""
        return self._all[-1]

    @property
    def label(self) -> int:
        """Label of the regime in force; 0 is the one the job began with."""
        return self.evidence.regime

    def begin(self, shift: float) -> None:
        """The network changed by `shift` (log): start afresh, keep what was known."""
        self._shift = shift
        self.n_changes += 1
        self._all.append(CallEvidence(self._noise, self.n_changes))
        self._settling = True
        if len(self._all) > self._max:
            del self._all[0]

    def recognise(self) -> bool:
        """Whether what was measured since `begin` fits an older regime, which then is in force again."""
        if not self._settling:
            return False
        current = self._all[-1]
        slots = np.flatnonzero(current.n_calls[: len(current)] > 0)
        if int(current.n_calls[slots].sum()) < MATCH_CALLS:
            return False
        now = current.centre(slots)
        self._settling = int(current.n_calls[slots].sum()) < 8 * MATCH_CALLS
        for index in range(len(self._all) - 2, -1, -1):
            older = self._all[index]
            pairs = [
                (at, other)
                for at, slot in enumerate(slots)
                if (other := older.find(int(current.key[slot]), current.candidates[slot])) is not None
                and older.n_units[other] >= MIN_UNITS
            ]
            if not pairs:
                continue
            here, there = np.array(pairs, dtype=np.int64).T
            gap = now[here] - older.centre(there)
            # The regime that was just left is not recognised unless nearly all of the change is gone.
            is_back = index < len(self._all) - 2 or float(np.median(gap)) / self._shift < BACK
            if (
                is_back
                and float(np.median(np.abs(gap))) < MATCH_WITHIN
                and float(np.mean(np.abs(gap))) < 2 * MATCH_WITHIN
            ):
                self._all[-1], self._all[index] = older, current
                del self._all[index]
                self._settling = False
                return True
        return False
