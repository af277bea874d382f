"""Detects changes of the network: congestion, another job, a recovered link.

Each setting's calls are compared with their earlier durations. A step's calls of one key share that step's noise, so
their mean is the unit. Neighbouring steps may be correlated, as in congestion that comes and goes; the units are
whitened by that correlation. They are standardised, clipped and summed two-sidedly (Page-Hinkley), per key and for all
keys of a step together. Old regimes keep their evidence under a label. If measurements fit an old regime again, its
evidence is used again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from ...modeling.features import Floats, Ints
from ..knowledge import RERUN_STD
from .observations import CLIP, ENOUGH, HORIZON_STEPS, LEAST_NOISE, CallEvidence, Columns

ALLOWANCE: Final = 0.75
"""Noise scales: half of a change by 5 % if steps scatter by 3 %, as Page-Hinkley recommends."""
LIMIT: Final = 13.0
"""Noise alone reaches this sum in one of exp(2 * ALLOWANCE * LIMIT), 300 million, units. If a coarse clock skews the
noise, it does in one of 500,000.
"""
MIN_SHIFT: Final = 0.03
"""A shift (log) below this is drift: the running means follow it, and no regime begins."""
MOST_ALIKE: Final = 0.97
MAX_REGIMES: Final = 8
"""Regimes that are kept, including the one in force."""


class FinishedSteps(NamedTuple):
    """Finished units: the whitened deviation of each in noise scales, and its deviation (log)."""

    keys: Ints
    """1 + key index; 0 stands for all keys together, if there are several, and comes first."""
    new: Floats
    deviation: Floats


class ChangeDetector(Columns):
    """Two-sided sums per key; `reset` when a new regime begins."""

    def __init__(self) -> None:
        self._sums = np.zeros((0, 2))
        """By key and direction (slower, faster); the next two count units and deviations since the sum was zero."""
        self._n = np.zeros((0, 2))
        self._total = np.zeros((0, 2))

    def reset(self) -> None:
        """A new regime began."""
        for one in (self._sums, self._n, self._total):
            one[:] = 0.0

    def update(self, units: FinishedSteps) -> Ints:
        """Take in deviations from earlier durations; return the keys that changed, mostly none."""
        keys = units.keys
        if not len(keys):
            return keys
        n_keys = int(keys.max()) + 1
        self.make_room(n_keys)
        sums, n, total = (one[:n_keys] for one in (self._sums, self._n, self._total))
        counts = np.bincount(keys)[:, None]
        added = np.bincount(keys, np.clip(units.new, -CLIP, CLIP))
        sums[:] = np.maximum(0.0, sums + np.column_stack([added, -added]) - ALLOWANCE * counts)
        n[:] = np.where(sums > 0.0, n + counts, 0.0)
        total[:] = np.where(sums > 0.0, total + np.bincount(keys, units.deviation)[:, None], 0.0)
        return np.flatnonzero((sums > LIMIT).any(axis=1)).astype(np.int64)

    def shift(self, keys: Ints) -> float:
        """The median shift (log) of these keys, each since its sum was zero."""
        side = np.argmax(self._sums[keys], axis=1)
        return float(np.median(self._total[keys, side] / np.maximum(self._n[keys, side], 1.0)))


class StepMeans(Columns):
    """Calls summed up to one unit per key and step; a unit is done when its key's next step begins."""

    def __init__(self) -> None:
        self._step = np.zeros(0, np.int64)
        self._n = np.zeros(0, np.int64)
        self._sum = np.zeros(0)
        self._last = np.zeros(0)
        """The unit before, standardised; 0 if there is none."""
        self._same, self._all = 0.0, float(HORIZON_STEPS)
        self._square, self._weight = 0.0, CLIP
        """Sum of squares of the units of all keys together, and its weight including a first guess."""

    @property
    def alike(self) -> float:
        """Correlation of neighbouring steps."""
        return min(max(self._same / self._all, 0.0), MOST_ALIKE)

    def reset(self) -> None:
        """A new regime began; the correlation of neighbouring steps is kept."""
        self._n[:], self._last[:] = 0, 0.0

    def add(self, keys: Ints, deviation: Floats, step: int, sigma: Callable[[Ints], Floats]) -> FinishedSteps:
        """Take in calls of one step, with their keys and deviations (log); returns units of the step before.

        `sigma` gives the standard deviation (log) of a unit by key.
        """
        self.make_room(int(keys.max()) + 1)
        n_calls = np.bincount(keys, minlength=len(self._n))
        fresh = np.flatnonzero((n_calls > 0) & (self._step != step))
        done = fresh[self._n[fresh] > 0]
        deviation_of = self._sum[done] / self._n[done]
        units = np.clip(deviation_of / np.maximum(sigma(done), LEAST_NOISE), -CLIP, CLIP)
        new = self._whiten(units, self._last[done])
        self._last[done] = units
        self._step[fresh], self._n[fresh], self._sum[fresh] = step, 0, 0.0
        self._n += n_calls
        self._sum += np.bincount(keys, deviation, minlength=len(self._sum))
        found = FinishedSteps(1 + done, new, deviation_of)
        return found if len(done) < 2 else self._with_all(found)

    def _with_all(self, units: FinishedSteps) -> FinishedSteps:
        n_keys = len(units.keys)
        pooled = float(units.new.sum()) / math.sqrt(n_keys)
        variance = max(1.0, (CLIP * n_keys + self._square) / self._weight)  # at first as if all keys agreed
        kept = 1.0 - 1.0 / HORIZON_STEPS
        self._square = kept * self._square + min(pooled**2, CLIP**2 * variance)
        self._weight = CLIP + kept * (self._weight - CLIP) + 1.0
        every = (0, pooled / math.sqrt(variance), units.deviation.mean())
        return FinishedSteps(*(np.append(one, of_keys) for one, of_keys in zip(every, units, strict=True)))

    def _whiten(self, units: Floats, before: Floats) -> Floats:
        known, alike = before != 0.0, self.alike
        new: Floats = np.where(known, (units - alike * before) / math.sqrt(1.0 - alike**2), units)
        if known.any():
            # A change of the network looks like correlation, too, and would hide itself: outliers count less.
            one, other = (np.clip(both[known], -0.5 * CLIP, 0.5 * CLIP) for both in (units, before))
            kept = 1.0 - 1.0 / HORIZON_STEPS
            self._same = kept * self._same + float(np.mean(one * other))
            self._all = kept * self._all + float(np.mean(0.5 * (one**2 + other**2)))
        return new


class Regimes:
    """The evidence of every regime that is kept; `evidence` is the current one."""

    def __init__(self) -> None:
        self.every = [CallEvidence()]
        """Evidence of all regimes that are kept; the one in force is last."""
        self.n_changes = 0
        self._settling = False
        self._shift = 0.0

    @property
    def evidence(self) -> CallEvidence:
        """CallEvidence of the regime in force."""
        return self.every[-1]

    def begin(self, shift: float) -> None:
        """The network changed by `shift` (log): begin a new regime and keep the old ones."""
        self._shift, self._settling = shift, True
        self.n_changes += 1
        self.every = [*self.every[1 - MAX_REGIMES :], CallEvidence(self.n_changes)]

    def recognise(self) -> bool:
        """Whether measurements since `begin` fit an older regime; if so, it is in force again."""
        if not self._settling:
            return False
        current = self.evidence
        slots = np.flatnonzero(current.n_calls[: len(current)])
        n_steps = int(current.n_units[slots].max(initial=0))  # a step's calls share its noise
        self._settling = n_steps < 4 * ENOUGH
        for older in reversed(self.every[:-1]) if n_steps >= ENOUGH else ():
            found = [older.find(int(current.key[slot]), current.candidates[slot]) for slot in slots.tolist()]
            is_known = [one is not None and older.n_units[one] > 0 for one in found]
            if not any(is_known):
                continue
            there = np.array([one for one, known in zip(found, is_known, strict=True) if known], np.int64)
            gaps = np.abs(current.centre(slots[is_known]) - older.centre(there))
            within = min(2.0 * RERUN_STD, 0.5 * abs(self._shift))  # nearer to it than to the regime before
            if float(np.median(gaps)) < within and float(np.mean(gaps)) < 4.0 * RERUN_STD:
                self.every = [one for one in self.every[:-1] if one is not older] + [older]
                self._settling = False
                return True
        return False
