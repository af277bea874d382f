"""Evidence of step times: a linear regression of log step time on the settings that ran, by a Kalman filter.

`StepEffects` follows the level, which may drift, and the effects of all trials, provisional settings and the variant of
the plan. It learns the correlation of neighbouring steps: if times drift by themselves, only changes that come and go
with its windows are a setting's effect. `StepKinds` separates kinds of steps that differ without any trial.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from enum import Enum
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from ...modeling.features import Floats
from ...modeling.kalman_filter import KalmanFilter
from .change_detection import MIN_SHIFT
from .observations import CLIP, ENOUGH, HORIZON_STEPS, LEAST_NOISE, Contrast, StepSums, contrast_of
from .risk import LEARNED

RECENT_STEPS: Final = 32
"""Newest steps that show the present step time; also the most steps of an experiment. A promotion is compared with the
setting before it for twice as many.
"""
LEAST_EFFECT: Final = 0.004
"""Least effect (log) that is worth an experiment, and least scatter of steps."""
ONE_IN_TEN: Final = 1.3
"""One value in ten is further off to one side than this many standard deviations."""


class Cooldown:
    """After a failure something rests for `HORIZON_STEPS`; after each further failure for twice as long."""

    first_steps = HORIZON_STEPS

    def __init__(self) -> None:
        self._until: dict[Hashable, tuple[int, int]] = {}
        """By name, the step at which the rest ends, and the number of rests."""

    def begin(self, name: Hashable, step: int) -> int:
        """Begin a rest at this step; return the step at which it ends."""
        n_times = self.n_times(name)
        self._until[name] = step + self.first_steps * 2**n_times, n_times + 1
        return self.until(name)

    def n_times(self, name: Hashable) -> int:
        """The number of rests."""
        return self._until.get(name, (0, 0))[1]

    def until(self, name: Hashable) -> int:
        """The step at which the rest ends."""
        return self._until.get(name, (0, 0))[0]


def in_pairs(chance: random.Random) -> Iterator[bool]:
    """True and False in pairs of random order, so that they do not match periods of the training."""
    while True:
        first = chance.random() < 0.5
        yield first
        yield not first


LEAST_DRIFT: Final = 0.0003
"""Least drift (log) of the level per step; the most is the noise."""
IN_COMMON: Final = 0.05
"""Correlation of neighbouring residuals up to this counts as chance."""
MOST_EFFECTS: Final = 128
"""Most separate effects, to bound the work per step; further settings share the effect of their key."""


class Shared(Enum):
    """Effects on steps that belong to no single setting."""

    exposed = "exposed"
    """The share of calls' time that steps wait for; its regressor is the extra time of a step's calls (log)."""
    variant = "variant"
    """The variant of the plan that is on trial."""


class KeyEffect(NamedTuple):
    """The effect that all settings of a key share; with very many keys some share one."""

    number: int


Effect = int | KeyEffect | Shared
"""Name of an effect: a setting's slot, or an effect that several share."""


def of_key(key: int) -> KeyEffect:
    """The shared effect of a key, by its index."""
    return KeyEffect(key % (MOST_EFFECTS // 2))


class StepEffects:
    """Effects (log, positive = slower) on steps by name.

    An effect's prior is one noise scale; it is much wider for settings that run from the first step on.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all effects."""
        self._state = KalmanFilter()
        """The level of log step times, then the effects."""
        self._state.add(1.0)
        self._places: dict[Effect, int] = {}
        self._ran_at: dict[Effect, int] = {}
        self._n_steps = 0
        self._squares, self._weight = LEAST_NOISE**2 / LEARNED, 1.0 / LEARNED  # the prior
        self._log_drift = math.log(LEAST_DRIFT)
        self._surprise = 0.0

    @property
    def noise(self) -> float:
        """Standard deviation of a step (log) around its level."""
        return max(LEAST_EFFECT, math.sqrt(self._squares / self._weight))

    def effect(self, shares: Mapping[Effect, float]) -> tuple[float, float]:
        """Mean and standard deviation of the joint effect of all of these on a step."""
        design = self._design(shares)
        design[0] = 0.0
        mean, variance = self._state.expected(design)
        return mean, math.sqrt(variance)

    def slowdown(self, shares: Mapping[Effect, float]) -> Contrast:
        """`effect` in the form of the sequential test that also judges calls."""
        mean, std = self.effect(shares)
        return contrast_of(mean, max(std, LEAST_DRIFT), self.noise)

    def alone(self, several: Sequence[Mapping[Effect, float]]) -> tuple[Floats, Floats]:
        """`effect` of each of several with equal numbers of names: means and standard deviations, shape [n] each."""
        at = np.array([[self._places.get(name, 0) for name in shares] for shares in several])
        shares = np.array([[*one.values()] for one in several]) * (at > 0)  # index 0 is the level
        covariance = self._state.covariance[at[:, :, None], at[:, None, :]]
        variance = np.einsum("ni,nij,nj->n", shares, covariance, shares)
        return (self._state.mean[at] * shares).sum(axis=1), np.sqrt(np.maximum(variance, 0.0))

    def know(self, name: Effect, found: tuple[float, float]) -> None:
        """Estimate this effect (log) anew from the given mean and standard deviation."""
        self.forget([name])
        self._places[name] = self._state.add(found[1] ** 2)
        self._state.mean[-1] = found[0]
        self._ran_at[name] = self._n_steps

    def expected(self, shares: Mapping[Effect, float]) -> float:
        """Expected log duration of a step with these effects."""
        return self._state.expected(self._design(shares))[0]

    def step(self, log_us: float, shares: Mapping[Effect, float]) -> None:
        """Take in one step: its log duration and its share of each named effect."""
        state = self._state
        if self._n_steps == 0:
            state.mean[0] = log_us
        self._n_steps += 1
        for name in shares:
            self._ran_at[name] = self._n_steps
            if name not in self._places and (not isinstance(name, int) or len(self._places) < MOST_EFFECTS):
                # The first step alone cannot separate the level from the effects.
                self._places[name] = state.add(1.0 if self._n_steps == 1 else self.noise**2)
        drift = min(math.exp(self._log_drift), self.noise)
        state.covariance[0, 0] += drift**2
        design = self._design(shares)
        # Clip a long step at what the level and faster settings predict, or at what its slower calls explain.
        fast = float(np.minimum(design[1:] * state.mean[1:], 0.0).sum())
        most = state.mean[0] + fast + CLIP * math.sqrt(self.noise**2 + state.covariance[0, 0])
        explained = state.mean[0] + shares.get(Shared.exposed, 0.0)
        value = min(log_us, max(most, explained, state.expected(design)[0]))
        surprise, variance = state.observe(design, value, self.noise, clip=CLIP)
        self._squares += surprise**2 * self.noise**2 / variance
        self._weight += 1.0
        scaled = surprise / math.sqrt(variance)
        self._log_drift += LEARNED * (scaled * self._surprise - IN_COMMON)
        self._log_drift = min(max(self._log_drift, math.log(LEAST_DRIFT)), math.log(self.noise))
        self._surprise = scaled
        if self._n_steps % HORIZON_STEPS == 0:
            since = self._n_steps - HORIZON_STEPS
            self.forget([name for name, ran_at in self._ran_at.items() if isinstance(name, int) and ran_at < since])

    def became_usual(self, shares: Mapping[Effect, float], others: Collection[Effect]) -> None:
        """The setting with these `shares` is an incumbent from now on; estimate the effects of `others` anew."""
        state, design = self._state, self._design(shares)
        state.mean[0], variance = state.expected(design)
        state.covariance[0] = state.covariance[:, 0] = state.covariance @ design
        state.covariance[0, 0] = variance
        if not self._places.keys() >= shares.keys():
            state.covariance[0, 0] += MIN_SHIFT**2
        self.forget(others)

    def level_moved(self, shift: float) -> None:
        """Training itself changed by `shift`: estimate the level anew."""
        self._state.mean[0] += shift
        self._state.covariance[0, 0] += MIN_SHIFT**2

    def forget(self, names: Collection[Effect]) -> None:
        """Forget the effects of settings that do not run any more."""
        kept = [name for name in self._places if name not in names]
        at = [0, *(self._places[name] for name in kept)]
        self._state.mean = self._state.mean[at]
        self._state.covariance = self._state.covariance[np.ix_(at, at)]
        self._places = {name: place for place, name in enumerate(kept, start=1)}
        self._ran_at = {name: self._ran_at[name] for name in kept}

    # ---- inside ---------------------------------------------------------------------------------------

    def _design(self, shares: Mapping[Effect, float]) -> np.ndarray:
        design = np.zeros(len(self._state.mean))
        design[0] = 1.0
        for name, share in shares.items():
            if name in self._places:
                design[self._places[name]] = share
        return design


WIDTH: Final = 0.2
"""Steps whose bytes differ by less than this (log) are of one kind."""


class StepKinds:
    """The kinds of one job's steps; `moved_bytes` counts their bytes, `usual_us` scales their durations."""

    def __init__(self) -> None:
        self.moved_bytes = StepSums()
        """Bytes of rank 0's calls in steps that have not ended."""
        self._newest: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        """Kind and scaled log duration of the newest steps."""
        self._yardstick: int | None = None
        self._differences: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_STEPS))
        """Log durations of other kinds less those of the reference kind."""

    def usual_us(self, step: int, duration_us: float) -> float | None:
        """A step's duration (above 0) scaled to the reference kind; None if too little is known of the step's own kind.

        The reference is the first kind with several steps, as validation may come before training. Steps that enqueue
        nothing (a replayed graph, or no listener yet) are of kind 0, which means none.
        """
        kind, log_us = round(math.log(max(1.0, self.moved_bytes.pop(step, 0.0))) / WIDTH), math.log(duration_us)
        if self._yardstick is None:
            self._newest.append((kind, log_us))
            alike = [one for one in self._newest if one[0] == kind]
            if kind and len(alike) >= 2 * ENOUGH:
                self._yardstick, self._newest = kind, deque(alike, RECENT_STEPS)
            return duration_us
        if kind != self._yardstick:
            differences = self._differences[kind]
            if others := [us for one, us in self._newest if one != kind]:
                differences.append(log_us - median(others))
            if len(differences) < ENOUGH:
                return None
            differs = median(differences)
            log_us -= differs if abs(differs) > MIN_SHIFT else 0.0
        self._newest.append((kind, log_us))
        return math.exp(log_us)
