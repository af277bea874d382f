"""When steps are counted, compared and changed: at the same boundary on every rank, from the same numbers.

A boundary is the end of an optimizer step, which all ranks reach. After each window of steps every rank contributes
three numbers to one maximum over all ranks: how long its steps took, how much device memory it had left, and what it
proposes. The search is a function of what comes back, so no rank can decide otherwise than the others. There is no
leader, no message and no store; a rank that is late is waited for, as in any collective, and where the collective fails
it raises on that rank before anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from .choices import Choices, StepSettings
from .search import Search

COUNTED_STEPS: Final = 4
"""Of a window while there is something to try, after one that is not counted: its buffers are made anew."""
SETTLED_STEPS: Final = 64
"""Of a window when there is not: each costs one small collective, and a proposal waits for it."""
_MOST = 1 << 20
"""More ranks, buckets or depths than there are: one number holds all three."""

Maximum = Callable[[Sequence[int]], Sequence[int]]


class Boundaries:
    """One rank's part.

    Args:
        choices: what may run, the same on every rank.
        rank: of `n_ranks`.
        maximum: the greatest over all ranks of each number, all below 2^62; a collective call.
        now_us: microseconds, when all that was asked of the device is done.
        free_bytes: of device memory, at the fullest moment so far.
    """

    def __init__(
        self,
        choices: Choices,
        begin: StepSettings,
        rank: int,
        n_ranks: int,
        maximum: Maximum,
        now_us: Callable[[], float],
        free_bytes: Callable[[], int],
    ) -> None:
        self.search = Search(choices, begin)
        self._rank, self._n_ranks = rank, n_ranks
        self._maximum, self._now_us, self._free_bytes = maximum, now_us, free_bytes
        self._n_steps = 0
        self._begun_us = 0.0
        self._proposed = 0

    def propose(self, bucket_bytes: int | None, prefetch: int | None) -> StepSettings:
        """Ask for something to be tried next; of several ranks that ask, the lowest is heard.

        Args:
            bucket_bytes: None: as it is.

        Returns:
            What exists nearest to it.
        """
        choices = self.search.choices
        asked = choices.nearest(bucket_bytes, prefetch, self.search.leader)
        place = choices.buckets_bytes.index(asked.bucket_bytes) * _MOST + choices.prefetches.index(asked.prefetch)
        self._proposed = (self._n_ranks - self._rank) * _MOST**2 + place
        return asked

    def begin_anew(self) -> None:
        """The window so far does not count; every rank calls this at the same boundary."""
        self._n_steps = 0

    def step_ended(self) -> StepSettings | None:
        """Every rank calls this at each boundary, with nothing of the step under way.

        Returns:
            What is to run from here; None: what runs already.
        """
        self._n_steps += 1
        if self._n_steps == 1:
            self._begun_us = self._now_us()
        if self._n_steps <= (SETTLED_STEPS if self.search.is_settled else COUNTED_STEPS):
            return None
        step_us = (self._now_us() - self._begun_us) / (self._n_steps - 1)
        said = [max(0, round(1000 * step_us)), _MOST**3 - max(0, self._free_bytes()), self._proposed]
        slowest_ns, fullest, asked = self._maximum(said)
        self._n_steps, self._proposed = 0, 0
        before = self.search.running
        after = self.search.ended(slowest_ns / 1000, _MOST**3 - fullest, self._settings(asked))
        return None if after == before else after

    def _settings(self, said: int) -> StepSettings | None:
        if not said:
            return None
        choices = self.search.choices
        bucket, depth = divmod(said % _MOST**2, _MOST)
        return StepSettings(choices.buckets_bytes[bucket], choices.prefetches[depth], self.search.leader.variant)
