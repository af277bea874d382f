"""The last word belongs to the step time: a plan that makes training slower is rolled back.

Log step times are compared with the steps before the plan changed, by a generalised likelihood ratio (Lorden
1971): were the last k steps slower, for any k? A plan slows steps from its adoption on, so for that k less is
asked than for all the others. The windows of its trials count, too: there it ran before. The doubt about the
yardstick is part of the ratio, so that few steps before the change, or much noise, ask for more steps after it.
With 1 % noise and a 2 % slowdown it fires after about four steps. Collectives that got faster on their own but
slow computation down show up here and nowhere else. An alarm says since when steps have been slower, so that only
the plan adopted then answers for it; and if steps do not recover once it is withdrawn, it was not the plan, and it
is reinstated.

The guard only detects: what it finds guilty is rolled back in tuner/learning/policy/oversight.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

REFERENCE_STEPS: Final = 40
MIN_REFERENCE: Final = 4
SLOWDOWN: Final = 0.02
"""Slowdown (log) that must not go unnoticed."""
LIMIT: Final = 3.4
"""Standard errors by which steps since an adoption must be slower for an alarm."""
LIMIT_IN_BETWEEN: Final = 4.7
"""Standard errors for any other last steps; both limits together give a false alarm once in some hundred watches."""
MOST_OF_ONE: Final = 3.1
"""What a single step may say, in noise scales: a straggling one must not pass for a slow plan."""
PRIOR_SIGMA: Final = 0.01
PRIOR_STEPS: Final = 4.0
"""Noise (log) of steps before anything is known, and how many of them that opinion weighs."""
NOISE_FLOOR: Final = 0.004
CLIP: Final = 2.5
CLIPPED_LESS: Final = 1.03
"""Steps before the change further off than this many noise scales are pulled in; what variance that takes."""
MOST_STRAGGLERS: Final = 0.15
"""What a larger share of the steps does counts as normal, not as an exception."""
WATCH_STEPS: Final = 60
"""Steps after a change for which it is still held responsible."""
MOST_PROMISED: Final = 0.0025
"""Most gain (log) of what was promised that steps are expected to show: gains of hidden collectives do not."""
RECOVERY_STEPS: Final = 8
NOTICED_WITHIN_STEPS: Final = 9
"""A slowdown must be noticed within this many steps in nine cases of ten."""
NINE_IN_TEN: Final = 1.28
LEFT_OF_SLOWDOWN: Final = 0.9
"""Share of a slowdown that still shows in steps: what the plan saves as promised may hide the rest."""
LEAST_KNOWN_STEPS: Final = 14
MOST_KNOWN_STEPS: Final = 40


def steps_to_know(noise: float) -> int:
    """Steps of such noise (log) that must be known before a change, or a slowdown by it would go unnoticed too long."""
    needed = (LIMIT + NINE_IN_TEN) * noise / (LEFT_OF_SLOWDOWN * SLOWDOWN)
    left = 1.0 / needed**2 - 1.0 / NOTICED_WITHIN_STEPS
    return max(LEAST_KNOWN_STEPS, math.ceil(min(1.0 / left, MOST_KNOWN_STEPS))) if left > 0 else MOST_KNOWN_STEPS


class Alarm(NamedTuple):
    """Steps have been `percent` slower for the last `n_steps` steps."""

    percent: float
    n_steps: int


class Guard:
    """Watches one job's steps: `changed` opens a watch, `step` answers with an alarm or None."""

    def __init__(self, slowdown: float = SLOWDOWN) -> None:
        self._slowdown = slowdown
        self._centre: float | None = None
        self._sigma = PRIOR_SIGMA
        self._promised = 0.0
        self._n_reference = 0
        self._watch_steps = WATCH_STEPS
        self._n_watched = 0
        self._watched: list[float] = []
        """Steps (log) with the change, those of its trials first, the newest last."""
        self._adopted_at: list[int] = []
        """How many of them there were before each adoption that is under watch; 0 for the first."""
        self._n_tried = 0
        """How many of them were its trials."""
        self._run: list[float] = []
        """Those of them that were slower when the alarm went off."""
        self._slow_centre: float | None = None
        self._recovery: list[float] = []

    @property
    def is_watching(self) -> bool:
        """True while a change is under watch."""
        return self._centre is not None

    def changed(
        self,
        reference_us: Sequence[float],
        watch_steps: int = WATCH_STEPS,
        tried_us: Sequence[float] = (),
        promised: float = 0.0,
    ) -> None:
        """From the next step on a newly promoted plan is in force.

        Args:
            reference_us: recent steps without what was promoted, the newest last. Steps of its trial windows must not
                be among them, or a slow candidate would be compared with itself.
            watch_steps: steps after which the watch ends.
            tried_us: steps of the trial windows that ran all that was promoted.
            promised: gain (log) that steps should show from now on: the less of it they show, the likelier is a harm.
        """
        self.settled()
        values = np.log([one for one in reference_us[-REFERENCE_STEPS:] if one > 0])
        if len(values) < MIN_REFERENCE:
            return
        self._watch_steps = watch_steps
        self._promised = min(max(promised, 0.0), MOST_PROMISED)
        self._n_reference = len(values)
        middle = float(np.median(values))
        spread = 1.4826 * float(np.median(np.abs(values - middle)))
        weight = len(values) / (len(values) + PRIOR_STEPS)
        rough = max(NOISE_FLOOR, math.sqrt(weight * spread**2 + (1.0 - weight) * PRIOR_SIGMA**2))
        # The median deviation knows no stragglers, but needs three times as many steps: it says what to clip, unless
        # many steps are so far off. That is how steps are, even if more than half of them are alike.
        common = float(np.quantile(np.abs(values - middle), 1.0 - MOST_STRAGGLERS, method="lower"))
        limit = max(CLIP * rough, common)
        kept = np.clip(values, middle - limit, middle + limit)
        total = CLIPPED_LESS * float(np.square(kept - kept.mean()).sum()) + PRIOR_STEPS * PRIOR_SIGMA**2
        self._sigma = max(NOISE_FLOOR, math.sqrt(total / (len(values) - 1 + PRIOR_STEPS)))
        # Nearly as robust as the median, but three steps of it say what five say of that.
        self._centre = float(np.mean(np.clip(values, middle - 2.0 * self._sigma, middle + 2.0 * self._sigma)))
        self._watched = np.log([one for one in tried_us[-WATCH_STEPS // 2 :] if one > 0]).tolist()
        self._n_tried = len(self._watched)
        self._adopted_at = [0]

    def changed_again(self) -> None:
        """Another plan came while the last one is under watch: both answer to the same yardstick, for longer."""
        self._n_watched = 0
        self._adopted_at.append(len(self._watched))

    def tried(self, duration_us: float) -> None:
        """One more step of the trial windows, which became known only now."""
        if self._centre is None or not duration_us > 0:
            return
        self._watched.insert(self._n_tried, math.log(duration_us))
        self._n_tried += 1
        self._adopted_at = [0, *(at + 1 for at in self._adopted_at[1:])]

    def step(self, duration_us: float) -> Alarm | None:
        """One finished step, without what known exploration cost in it."""
        if not duration_us > 0:
            return None
        log_us = math.log(duration_us)
        if self._slow_centre is not None:
            self._recovery.append(log_us)
        if self._centre is None:
            return None
        self._n_watched += 1
        self._watched.append(log_us)
        if len(self._watched) > WATCH_STEPS:
            del self._watched[0]
            self._adopted_at = [at - 1 for at in self._adopted_at if at > 0]
            self._n_tried = max(0, self._n_tried - 1)
        excess = (np.array(self._watched[::-1]) - self._centre) / self._sigma
        lengths = np.arange(1, len(excess) + 1)
        means = np.cumsum(np.minimum(excess, MOST_OF_ONE)) / lengths
        ratios = (means + self._promised / self._sigma) / np.sqrt(1.0 / lengths + 1.0 / self._n_reference)
        ratios[means * self._sigma < 0.5 * self._slowdown] = 0.0
        limits = np.full(len(ratios), LIMIT_IN_BETWEEN)
        limits[len(ratios) - 1 - np.array(self._adopted_at, dtype=np.int64)] = LIMIT
        n_steps = int(np.argmax(ratios / limits)) + 1
        if ratios[n_steps - 1] > limits[n_steps - 1]:
            self._run = self._watched[-n_steps:]
            since = min(n_steps, len(self._watched) - self._n_tried)
            return Alarm(100.0 * (math.exp(float(np.median(self._run)) - self._centre) - 1.0), since)
        if self._n_watched >= self._watch_steps:
            self.settled()
        return None

    def settled(self) -> None:
        """The watch is over: what ran lately is the new normal."""
        self._centre = None
        self._n_watched = 0
        self._watched, self._run, self._adopted_at = [], [], []
        self._n_tried = 0

    def rolled_back(self) -> None:
        """The plan is withdrawn; from the next step on it is watched whether steps recover."""
        self._slow_centre = float(np.median(self._run)) if self._run else None
        self._recovery.clear()
        self.settled()

    def recovered(self) -> bool | None:
        """After a roll-back: True when steps became faster again, False when not, None while unknown."""
        if self._slow_centre is None or len(self._recovery) < RECOVERY_STEPS:
            return None
        # The first steps may still have run under the plan that is being withdrawn.
        gained = self._slow_centre - float(np.median(self._recovery[RECOVERY_STEPS // 3 :]))
        self._slow_centre = None
        return gained > 0.4 * self._slowdown
