"""Which bucket and depth to run next, from how long steps took: a pure function of numbers that all ranks share.

One setting leads, another is on trial. Both run for some steps in turns until their step times tell them apart, and
whatever is not faster gives way to the leader. Each trial differs from the leader in the bucket, in the depth or in the
variant; the search is over when nothing around the leader is left to try. It begins anew when steps change by
themselves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, pvariance
from typing import Final, NamedTuple

from .choices import Choices, StepSettings

LIMIT: Final = 3.3
"""Standard deviations by which steps differ beyond doubt; the step guard's of tuner/learning/policy."""
LEAST_GAIN: Final = 0.004
"""Less (log) is not worth a change; likewise."""
LEAST_NOISE: Final = 0.001
"""Of a window's mean (log): few windows may be alike by chance."""
LEAST_WINDOWS: Final = 2
"""Of the leader, before anything is on trial."""
MOST_WINDOWS: Final = 6
"""Of what is on trial: what has not won by then is not worth more."""
RECENT: Final = 8
"""Windows of the leader that still count: training changes."""
SHIFT: Final = 0.1
"""Steps differ by so much (log) from what they were when the search ended: they are others."""
REST_WINDOWS: Final = 8
"""From the end of a search to the next; each further one waits twice as long."""
UNKNOWN_NOISE: Final = 0.01
"""Standard deviation (log) of a window's mean, assumed besides few windows."""
PRIOR_WINDOWS: Final = 2
"""That assumption counts as so many windows."""


class Judged(NamedTuple):
    """How a trial has ended."""

    tried: StepSettings
    against: StepSettings
    is_faster: bool
    difference: float
    """Of step times (log); negative: what was tried took less."""
    doubt: float
    """Of the difference, `LIMIT` standard deviations."""


class Search:
    """One job's search.

    Args:
        choices: what may run.
    """

    def __init__(self, choices: Choices, begin: StepSettings) -> None:
        self.choices = choices
        self.leader = self.running = begin
        self.judged: Judged | None = None
        """The latest trial that has ended."""
        self._trial: StepSettings | None = None
        self._led: deque[float] = deque(maxlen=RECENT)
        """Logarithms of the leader's windows, newest last."""
        self._tried: list[float] = []
        self._rejected: set[StepSettings] = set()
        self._asked: StepSettings | None = None
        self._rest = 0
        self._rests = 0
        self._settled_at: float | None = None
        self._odd = 0

    @property
    def is_settled(self) -> bool:
        """Nothing is left to try."""
        return self._settled_at is not None

    def ended(self, step_us: float, free_bytes: int, asked: StepSettings | None = None) -> StepSettings:
        """A window of steps has ended.

        Args:
            step_us: mean step of it, of the slowest rank.
            free_bytes: device memory that is free on the fullest rank.

        Returns:
            What the next window runs.
        """
        log_us = math.log(max(step_us, 1e-9))
        if self.running == self.leader:
            self._led.append(log_us)
        else:
            self._tried.append(log_us)
            self._judge()
        if asked is not None and asked not in (self.leader, self._trial):
            self._asked, self._trial, self._tried = asked, None, []  # what is undecided comes again later
            self._rejected.discard(asked)
            self._settled_at = None
        if self._settled_at is not None:
            self._watch(log_us)
        else:
            self._choose(free_bytes)
        return self.running

    def _judge(self) -> None:
        """Whether what is on trial leads from now on, gives way for good, or runs again."""
        assert self._trial is not None
        difference = fmean(self._tried) - fmean(self._led)
        doubt = LIMIT * self._noise() * math.sqrt(1 / len(self._tried) + 1 / len(self._led))
        is_faster = difference < -max(doubt, LEAST_GAIN)
        judged = Judged(self._trial, self.leader, is_faster, difference, doubt)
        if is_faster:
            self._rejected.add(self.leader)
            self.leader, self._trial = self._trial, None
            self._led = deque(self._tried, maxlen=RECENT)
        elif difference > doubt or difference - doubt > -LEAST_GAIN or len(self._tried) >= MOST_WINDOWS:
            self._rejected.add(self._trial)
            self._trial = None
        if self._trial is None:
            self._tried, self.judged = [], judged

    def _noise(self) -> float:
        """Standard deviation (log) of a window's mean."""
        squares = sum(len(part) * pvariance(part) for part in (self._led, self._tried) if len(part) > 1)
        freedom = sum(max(0, len(part) - 1) for part in (self._led, self._tried))
        prior = PRIOR_WINDOWS * UNKNOWN_NOISE**2
        return max(LEAST_NOISE, math.sqrt((squares + prior) / (freedom + PRIOR_WINDOWS)))

    def _choose(self, free_bytes: int) -> None:
        if self._trial is not None:  # in turns
            lead_is_behind = len(self._led) <= len(self._tried) and len(self._led) < RECENT
            self.running = self.leader if lead_is_behind and self.running != self.leader else self._trial
            return
        self.running = self.leader
        if len(self._led) < LEAST_WINDOWS:
            return
        asked, self._asked = self._asked, None
        for candidate in [*([asked] if asked is not None else []), *self.choices.around(self.leader)]:
            if candidate in self._rejected or candidate == self.leader:
                continue
            if self.choices.more_bytes(self.leader, candidate) <= free_bytes:
                self._trial = self.running = candidate
                return
        self._settled_at = fmean(self._led)
        self._rest = REST_WINDOWS << min(self._rests, 10)

    def _watch(self, log_us: float) -> None:
        """Steps that changed by themselves, twice in a row and not too soon, are another training."""
        assert self._settled_at is not None
        self._rest -= 1
        self._odd = self._odd + 1 if abs(log_us - self._settled_at) > SHIFT else 0
        if self._odd >= 2 and self._rest <= 0:
            self._rests += 1
            self._odd, self._settled_at = 0, None
            self._rejected.clear()
            self._led = deque(self._recent(2), maxlen=RECENT)

    def _recent(self, n: int) -> Sequence[float]:
        return list(self._led)[-n:]
