"""By how much steps take longer with each setting that is being tried, while they run with and without it.

A Kalman filter over log step times: their level, which may drift, and on top of it the effect of every setting on
trial or lead that ran in the step. How much of a step's noise the next one shares is learned: where times wander by
themselves, only what comes and goes with the turns of a setting is its doing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Final

import numpy as np

from zerotune.tuner.learning.policy.steps.kalman_filter import KalmanFilter

OF_KEY: Final = 1.0
"""Prior standard deviation, in noise scales, of what trying anything at a key does to a step."""
OF_SETTING: Final = 0.7
"""Prior standard deviation, in noise scales, of what a setting adds to its key's effect."""
MOST_EFFECTS: Final = 128
"""With more, settings that come new share what is known of their key: work per step is bounded."""
NOISE: Final = 0.01
NOISE_WEIGHT: Final = 10.0
"""Noise (log) of steps before anything is known, and how many of them that opinion weighs."""
NOISE_FLOOR: Final = 0.003
LEAST_DRIFT: Final = 0.0003
"""The level moves by no less (log) from one step to the next, and by no more than the noise."""
FOLLOWS: Final = 0.1
"""How fast what is thought of the drift follows what neighbouring steps have in common."""
IN_COMMON: Final = 0.05
"""So much correlation of neighbouring surprises is left to chance."""
MOST_OF_ONE: Final = 4.0
"""What a single step may say, in noise scales: a straggling one must not pass for a slow setting."""
CHANGED: Final = 0.02
"""By how much (log) the level may move as something that no step has spoken of becomes an incumbent."""
KEPT_STEPS: Final = 120
"""A setting that did not run for this many steps is forgotten."""
KEY_KEPT_STEPS: Final = 2000
"""A key that tried nothing for this many steps is forgotten."""


class StepEffects:
    """Effects (log, positive = slower) on steps by name: 0 and above for settings, below 0 for what they share."""

    def __init__(self) -> None:
        self._belief = KalmanFilter()
        """The level of log step times, then the effects."""
        self._belief.add(1.0)
        self._places: dict[int, int] = {}
        self._ran_at: dict[int, int] = {}
        self._n_steps = 0
        self._squares = NOISE_WEIGHT * NOISE**2
        self._weight = NOISE_WEIGHT
        self._log_drift = math.log(LEAST_DRIFT)
        self._surprise = 0.0

    @property
    def noise(self) -> float:
        """Standard deviation of a step (log) around its level."""
        return max(NOISE_FLOOR, math.sqrt(self._squares / self._weight))

    @property
    def drift(self) -> float:
        """Standard deviation of how far (log) the level moves from one step to the next."""
        return min(math.exp(self._log_drift), self.noise)

    def effect(self, shares: Mapping[int, float]) -> tuple[float, float]:
        """Mean and standard deviation of what steps take longer with all of these together."""
        mean, variance = self._belief.expected(self._design(shares, level=0.0))
        return mean, math.sqrt(variance)

    def know(self, name: int, std: float) -> None:
        """What this adds to a step is asked anew: it may be as large as `std` (log)."""
        self.forget([name])
        self._places[name] = self._belief.add(std**2)
        self._ran_at[name] = self._n_steps

    def expected(self, shares: Mapping[int, float]) -> float:
        """Log duration of a step with these."""
        return self._belief.expected(self._design(shares, level=1.0))[0]

    def step(self, log_us: float, shares: Mapping[int, float]) -> None:
        """Take in one step.

        Args:
            log_us: log duration.
            shares: how often each named effect was in the step.
        """
        belief = self._belief
        if self._n_steps == 0:
            belief.mean[0] = log_us
        self._n_steps += 1
        for name in shares:
            self._ran_at[name] = self._n_steps
            if name not in self._places and (name < 0 or len(self._places) < MOST_EFFECTS):
                scales = OF_SETTING if name >= 0 else OF_KEY
                self._places[name] = belief.add((scales * self.noise) ** 2)
        belief.covariance[0, 0] += self.drift**2
        design = self._design(shares, level=1.0)
        expected, variance = belief.expected(design)
        # What is known of faster settings counts; how slow a step may seem is measured without the slower ones.
        fast = float(np.minimum(design[1:] * belief.mean[1:], 0.0).sum())
        most = belief.mean[0] + fast + MOST_OF_ONE * math.sqrt(self.noise**2 + belief.covariance[0, 0])
        value = min(log_us, max(most, expected))
        surprise, variance = belief.observe(design, value, self.noise, clip=MOST_OF_ONE)
        self._squares += surprise**2 * self.noise**2 / variance
        self._weight += 1.0
        scaled = surprise / math.sqrt(variance)
        self._log_drift += FOLLOWS * (scaled * self._surprise - IN_COMMON)
        self._log_drift = min(max(self._log_drift, math.log(LEAST_DRIFT)), math.log(self.noise))
        self._surprise = scaled
        if self._n_steps % KEPT_STEPS == 0:
            self._forget(
                lambda name: self._n_steps - self._ran_at[name] > (KEPT_STEPS if name >= 0 else KEY_KEPT_STEPS)
            )

    def became_usual(self, shares: Mapping[int, float], others: Collection[int]) -> None:
        """What runs as `shares` is an incumbent from now on; what is known of these and of `others` is asked anew."""
        belief = self._belief
        known = [self._places[name] for name in shares if name in self._places]
        if len(known) < len(shares):
            belief.covariance[0, 0] += CHANGED**2
        belief.mean[0] += belief.mean[known].sum()
        belief.covariance[0] += belief.covariance[known].sum(axis=0)
        belief.covariance[:, 0] += belief.covariance[:, known].sum(axis=1)
        self._forget(lambda name: name in shares or name in others)

    def level_moved(self, shift: float = 0.0) -> None:
        """Training has another pace: what steps take without anything on trial is asked anew."""
        self._belief.mean[0] += shift
        self._belief.covariance[0, 0] += CHANGED**2

    def forget(self, names: Collection[int]) -> None:
        """These do not run any more."""
        self._forget(lambda name: name in names)

    # ---- inside ---------------------------------------------------------------------------------------

    def _design(self, shares: Mapping[int, float], *, level: float) -> np.ndarray:
        design = np.zeros(len(self._belief.mean))
        design[0] = level
        for name, share in shares.items():
            if name in self._places:
                design[self._places[name]] = share
        return design

    def _forget(self, is_over: Callable[[int], bool]) -> None:
        kept = [name for name in self._places if not is_over(name)]
        at = [0, *(self._places[name] for name in kept)]
        self._belief.mean = self._belief.mean[at]
        self._belief.covariance = self._belief.covariance[np.ix_(at, at)]
        self._places = {name: place for place, name in enumerate(kept, start=1)}
        self._ran_at = {name: self._ran_at[name] for name in kept}
