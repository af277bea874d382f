"""Chooses the next bucket, depth and variant from step times: a pure function of numbers that all ranks share.

One setting leads, and another is on trial. They run in turns until their step times differ significantly. A trial that
is not faster gives way to the leader. Each trial differs from the leader in the bucket, in the depth or in the variant.
The search ends when no neighbour of the leader is left to try. It begins anew if step times change by themselves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, pvariance
from typing import Final, NamedTuple

from .choices import Choices, StepSettings

LIMIT: Final = 3.3
"""Standard deviations of a significant difference, as the step guard of tuner/learning/policy has it."""
LEAST_GAIN: Final = 0.004
"""Least gain (log) for a change, as the step guard has it."""
LEAST_NOISE: Final = 0.001
"""Least standard deviation (log) of a window's mean: few windows may be equal by chance."""
LEAST_WINDOWS: Final = 2
"""Windows of the leader before the first trial."""
MOST_WINDOWS: Final = 6
"""Windows of a trial: a setting that has not won by then gains too little."""
RECENT: Final = 8
"""Last windows of the leader that count, since training changes."""
SHIFT: Final = 0.1
"""Difference (log) from the step time at the end of the search with which a new search begins."""
REST_WINDOWS: Final = 8
"""Windows from the end of a search to the next; each further search waits twice as long."""
UNKNOWN_NOISE: Final = 0.01
"""Prior standard deviation (log) of a window's mean."""
PRIOR_WINDOWS: Final = 2
"""Weight of this prior, in windows."""


class Judged(NamedTuple):
    """The result of a trial."""

    tried: StepSettings
    against: StepSettings
    is_faster: bool
    difference: float
    """Difference of step times (log); negative: the trial was faster."""
    doubt: float
    """`LIMIT` standard deviations of the difference."""


class Search:
    """One job's search."""

    def __init__(self, choices: Choices, begin: StepSettings) -> None:
        self.choices = choices
        self.leader = self.running = begin
        self.judged: Judged | None = None
        """The last trial that has ended."""
        self._trial: StepSettings | None = None
        self._led: deque[float] = deque(maxlen=RECENT)
        """Log step times of the leader's windows, newest last."""
        self._tried: list[float] = []
        self._rejected: set[StepSettings] = set()
        self._asked: StepSettings | None = None
        self._rest = 0
        self._rests = 0
        self._settled_at: float | None = None
        self._odd = 0

    @property
    def is_settled(self) -> bool:
        """No neighbour of the leader is left to try."""
        return self._settled_at is not None

    def ended(self, step_us: float, free_bytes: int, asked: StepSettings | None = None) -> StepSettings:
        """The setting of the next window, after a window of steps has ended.

        Args:
            step_us: its mean step time on the slowest rank.
            free_bytes: free device memory on the fullest rank.
        """
        log_us = math.log(max(step_us, 1e-9))
        if self.running == self.leader:
            self._led.append(log_us)
        else:
            self._tried.append(log_us)
            self._judge()
        if asked is not None and asked not in (self.leader, self._trial):
            self._asked, self._trial, self._tried = asked, None, []  # an undecided trial comes again later
            self._rejected.discard(asked)
            self._settled_at = None
        if self._settled_at is not None:
            self._watch(log_us)
        else:
            self._choose(free_bytes)
        return self.running

    def _judge(self) -> None:
        """Let the trial lead from now on, give way for good, or run again."""
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
        """Begin anew if two windows in a row differ from the end of the search, and the rest is over."""
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
