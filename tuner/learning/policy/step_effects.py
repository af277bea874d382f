"""What step times say: one linear regression of log step time on what ran, by a Kalman filter.

`StepEffects` follows the level, which may drift, and on top of it the effect of every setting on trial or provisional,
and of the variant of the plan, that ran in the step. How much of a step's noise the next one shares is learned: where
times wander by themselves, only what comes and goes with the windows of a setting is its doing. `StepKinds` tells steps
apart that differ anyway.
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
from .observations import (
    CLIP,
    ENOUGH,
    HORIZON_STEPS,
    LEAST_NOISE,
    Contrast,
    StepSums,
    contrast_of,
)
from .risk import LEARNED

RECENT_STEPS: Final = 32
"""Newest steps, which say how long one takes now; an experiment lasts no longer. Twice as many compare what was
promoted with what ran before it.
"""
LEAST_EFFECT: Final = 0.004
"""Less (log) is not worth asking, and steps are believed to scatter by no less."""
ONE_IN_TEN: Final = 1.3
"""One in ten is further off to one side than so many standard deviations."""


class Cooldown:
    """What turned out to be no good rests for so many steps, and for twice as long after each further time."""

    first_steps = HORIZON_STEPS

    def __init__(self) -> None:
        self._until: dict[Hashable, tuple[int, int]] = {}
        """The step before which it rests, and how often it did."""

    def begin(self, name: Hashable, step: int) -> int:
        """It rests from this step on; the step until which it does."""
        n_times = self.n_times(name)
        self._until[name] = step + self.first_steps * 2**n_times, n_times + 1
        return self.until(name)

    def n_times(self, name: Hashable) -> int:
        """How often it rested."""
        return self._until.get(name, (0, 0))[1]

    def until(self, name: Hashable) -> int:
        """The step from which it rests no longer."""
        return self._until.get(name, (0, 0))[0]


def in_pairs(chance: random.Random) -> Iterator[bool]:
    """With and without, in pairs whose order is drawn by chance: training has periods of its own."""
    while True:
        first = chance.random() < 0.5
        yield first
        yield not first


LEAST_DRIFT: Final = 0.0003
"""The level moves by no less (log) from one step to the next, and by no more than the noise."""
IN_COMMON: Final = 0.05
"""So much correlation of neighbouring surprises is left to chance."""
MOST_EFFECTS: Final = 128
"""With more, settings that come new share what is known of their key: work per step is bounded."""


class Shared(Enum):
    """Effects on steps that no setting has by itself."""

    exposed = "exposed"
    """The share of calls' time that steps wait for: it is in a step as often as its calls take longer (log)."""
    variant = "variant"
    """The variant of the plan that is on trial."""


class KeyEffect(NamedTuple):
    """What settings at a key have in common; with very many keys some share it."""

    number: int


Effect = int | KeyEffect | Shared
"""Name of an effect: the slot of a setting, or what several share."""


def of_key(key: int) -> KeyEffect:
    """What settings at a key, by index, have in common."""
    return KeyEffect(key % (MOST_EFFECTS // 2))


class StepEffects:
    """Effects (log, positive = slower) on steps by name.

    Before anything is known each is one noise scale large; those that run from the first step on may be of any size.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """All is asked anew."""
        self._state = KalmanFilter()
        """The level of log step times, then the effects."""
        self._state.add(1.0)
        self._places: dict[Effect, int] = {}
        self._ran_at: dict[Effect, int] = {}
        self._n_steps = 0
        self._squares, self._weight = LEAST_NOISE**2 / LEARNED, 1.0 / LEARNED  # a first opinion
        self._log_drift = math.log(LEAST_DRIFT)
        self._surprise = 0.0

    @property
    def noise(self) -> float:
        """Standard deviation of a step (log) around its level."""
        return max(LEAST_EFFECT, math.sqrt(self._squares / self._weight))

    def effect(self, shares: Mapping[Effect, float]) -> tuple[float, float]:
        """Mean and standard deviation of what steps take longer with all of these together."""
        design = self._design(shares)
        design[0] = 0.0
        mean, variance = self._state.expected(design)
        return mean, math.sqrt(variance)

    def slowdown(self, shares: Mapping[Effect, float]) -> Contrast:
        """`effect` for the sequential test, by which calls are judged, too."""
        mean, std = self.effect(shares)
        return contrast_of(mean, max(std, LEAST_DRIFT), self.noise)

    def alone(self, several: Sequence[Mapping[Effect, float]]) -> tuple[Floats, Floats]:
        """`effect` of each of several, which have as many names: means and standard deviations, shape [n] each."""
        at = np.array([[self._places.get(name, 0) for name in shares] for shares in several])
        shares = np.array([[*one.values()] for one in several]) * (at > 0)  # at place 0 is the level
        covariance = self._state.covariance[at[:, :, None], at[:, None, :]]
        variance = np.einsum("ni,nij,nj->n", shares, covariance, shares)
        return (self._state.mean[at] * shares).sum(axis=1), np.sqrt(np.maximum(variance, 0.0))

    def know(self, name: Effect, found: tuple[float, float]) -> None:
        """What this adds to a step (log) is asked anew: its mean and standard deviation as far as it is known."""
        self.forget([name])
        self._places[name] = self._state.add(found[1] ** 2)
        self._state.mean[-1] = found[0]
        self._ran_at[name] = self._n_steps

    def expected(self, shares: Mapping[Effect, float]) -> float:
        """Log duration of a step with these."""
        return self._state.expected(self._design(shares))[0]

    def step(self, log_us: float, shares: Mapping[Effect, float]) -> None:
        """Take in one step: its log duration, and how often each named effect was in it."""
        state = self._state
        if self._n_steps == 0:
            state.mean[0] = log_us
        self._n_steps += 1
        for name in shares:
            self._ran_at[name] = self._n_steps
            if name not in self._places and (not isinstance(name, int) or len(self._places) < MOST_EFFECTS):
                # With the first step comes nothing that the level could be told by.
                self._places[name] = state.add(1.0 if self._n_steps == 1 else self.noise**2)
        drift = min(math.exp(self._log_drift), self.noise)
        state.covariance[0, 0] += drift**2
        design = self._design(shares)
        # What is known of faster settings counts; of slower ones only what their calls explain.
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
        """What runs as `shares` is an incumbent from now on; what is known of `others` is asked anew."""
        state, design = self._state, self._design(shares)
        state.mean[0], variance = state.expected(design)
        state.covariance[0] = state.covariance[:, 0] = state.covariance @ design
        state.covariance[0, 0] = variance
        if not self._places.keys() >= shares.keys():
            state.covariance[0, 0] += MIN_SHIFT**2
        self.forget(others)

    def level_moved(self, shift: float) -> None:
        """Training has another pace: what steps take without anything on trial is asked anew."""
        self._state.mean[0] += shift
        self._state.covariance[0, 0] += MIN_SHIFT**2

    def forget(self, names: Collection[Effect]) -> None:
        """These do not run any more."""
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
"""Steps within this much (log bytes) are of one kind."""


class StepKinds:
    """One job's steps; `moved_bytes` says what they move, `usual_us` how long they would have taken as usual ones."""

    def __init__(self) -> None:
        self.moved_bytes = StepSums()
        """By rank 0's calls, of steps that have not ended."""
        self._newest: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        """Kind, and log duration as one of the yardstick's kind."""
        self._yardstick: int | None = None
        self._differences: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_STEPS))
        """Of the other kinds."""

    def usual_us(self, step: int, duration_us: float) -> float | None:
        """A step's duration, which is above 0, as one of the usual kind; None where too little is known of its own.

        The first kind of several steps is the yardstick: validation may come before training. Steps that enqueue
        nothing (a replayed graph, or nobody listened yet) are of kind 0, which is none.
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
