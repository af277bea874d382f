"""What steps say about promotions, without asking: plans differ from window to window, and steps with them.

A group's promotions save microseconds as calls say; whether steps are that much shorter depends on what computation
suffers while they run, their *side effect*. A step's duration, with what calls saved in it added back, moves with the
side effects of what was in force. A Kalman filter follows these and the level of steps, which may drift. What is
known of a side effect slowly fades, and more so when a group's settings change.

What a whole-plan variant is worth follows from that: only where steps may well be faster with it is it tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from zerotune.tuner.learning.policy.evidence.belief import KalmanFilter
from zerotune.tuner.learning.policy.trials.trial import expected_gain

SIDE_EFFECT: Final = 0.1
"""How much (log) settings may slow computation down, or speed it up, while they run, before any step has spoken."""
FADES_IN_STEPS: Final = 5000.0
"""Steps after which nothing is known of a side effect any more."""
DRIFT: Final = 0.001
"""How far (log) the level of steps moves from one to the next."""
NOISE: Final = 0.01
NOISE_WEIGHT: Final = 10.0
"""Noise (log) of steps before anything is known, and how many of them that opinion weighs."""
CLIP: Final = 3.0
"""A step further off than this many standard deviations is pulled in."""


class StepGains:
    """Side effects (log, positive = faster) of groups of promotions while they run, by name.

    Args:
        noise: of one step (log), before any has spoken.
    """

    def __init__(self, noise: float = NOISE) -> None:
        self._places: dict[str, int] = {}
        self._belief = KalmanFilter()
        """The level of log step times, then the groups' side effects."""
        self._belief.add(1.0)
        self._n_steps = 0
        self._squares = NOISE_WEIGHT * noise**2

    @property
    def noise(self) -> float:
        """Standard deviation of a step (log) around what was expected of it."""
        return math.sqrt(self._squares / (NOISE_WEIGHT + self._n_steps))

    def side_effect(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of what computation gains while this group runs."""
        at = self._places.get(name)
        if at is None:
            return 0.0, SIDE_EFFECT
        return float(self._belief.mean[at]), math.sqrt(float(self._belief.covariance[at, at]))

    def changed(self, name: str, share: float) -> None:
        """Other settings run now for this `share` of the time that a group runs."""
        at = self._places.get(name)
        if at is not None:
            self._doubt(np.array([at]), share)

    def step(self, log_us: float, in_force: Mapping[str, float]) -> None:
        """Take in a step: log duration as if calls had saved nothing, and by group the share of it that calls ran."""
        belief = self._belief
        if self._n_steps == 0:
            belief.mean[0] = log_us
        for name in in_force:
            if name not in self._places:
                self._places[name] = belief.add(SIDE_EFFECT**2)
        design = np.zeros(len(belief.mean))
        design[0] = 1.0
        for name, share in in_force.items():
            design[self._places[name]] = -share
        belief.covariance[0, 0] += DRIFT**2
        self._doubt(np.arange(1, len(belief.mean)), 1.0 / FADES_IN_STEPS)
        noise = self.noise
        surprise, variance = belief.observe(design, log_us, noise, clip=CLIP)
        self._n_steps += 1
        self._squares += surprise**2 * noise**2 / variance

    def _doubt(self, at: np.ndarray, share: float) -> None:
        """What is known fades: by `share` towards nothing, never beyond."""
        covariance = self._belief.covariance
        variance = covariance[at, at]
        covariance[at, at] = np.maximum(variance, np.minimum(variance + share * SIDE_EFFECT**2, SIDE_EFFECT**2))


def steps_worth(gain: float, doubt: float, *, least: float, noise: float, most_units: int, n_steps: int) -> float:
    """What trying a variant is worth, in steps' time: what may be gained by it later, less what it costs to see.

    Args:
        gain: by how much (log) steps should be faster with it, mostly negative.
        doubt: standard deviation of that.
        least: gains below this are not taken.
        noise: of one step.
        most_units: steps that are compared at most.
        n_steps: steps so far; a job is expected to go on for as long again.

    Returns:
        Steps; below zero it costs more than it promises.
    """
    loss = max(0.0, -gain)
    n_needed = 2.0 * (1.3 * noise / loss) ** 2 if loss else math.inf
    return n_steps * expected_gain(gain - least, doubt) - loss * min(max(n_needed, 2.0), most_units)
