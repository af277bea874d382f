"""Counts, compares and changes steps at the same boundary on every rank, from the same numbers.

A boundary is the end of an optimizer step, which all ranks reach. After each window of steps, all ranks take a maximum
of three numbers: their step time, the device memory they had used, and their proposal. The search is a function of the
three maxima, so no rank can decide otherwise than the others. There is no leader, message or store. All ranks wait for
a late rank, as in any collective. If the collective fails, it raises before anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from .choices import Choices, StepSettings
from .search import Search

COUNTED_STEPS: Final = 4
"""Steps of a window during the search. One step before them is not counted, since its buffers are made anew."""
SETTLED_STEPS: Final = 64
"""Steps of a window after the search: each window costs one small collective, and a proposal waits for its end."""
_MOST = 1 << 20
"""A bound of ranks, buckets and depths, so that one number can hold all three."""

Maximum = Callable[[Sequence[int]], Sequence[int]]


class Boundaries:
    """One rank's part.

    Args:
        choices: the settings that may run, the same on every rank.
        maximum: a collective that returns the maximum over all ranks of each number; all are below 2^62.
        now_us: waits until the device has done all work, and returns the time.
        free_bytes: device memory that was free at the fullest moment so far.
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
        """Propose the next trial, with None for what stays; returns the nearest available setting.

        Of several proposals, that of the lowest rank counts.
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
        """The setting of the next steps; None: it stays as it is.

        Every rank calls this at each boundary, when no call of the step is under way.
        """
        self._n_steps += 1
        if self._n_steps == 1:
            self._begun_us = self._now_us()
        if self._n_steps <= (SETTLED_STEPS if self.search.is_settled else COUNTED_STEPS):
            return None
        step_us = (self._now_us() - self._begun_us) / (self._n_steps - 1)
        mine = [max(0, round(1000 * step_us)), _MOST**3 - max(0, self._free_bytes()), self._proposed]
        slowest_ns, fullest, asked = self._maximum(mine)
        self._n_steps, self._proposed = 0, 0
        before = self.search.running
        after = self.search.ended(slowest_ns / 1000, _MOST**3 - fullest, self._settings(asked))
        return None if after == before else after

    def _settings(self, proposed: int) -> StepSettings | None:
        if not proposed:
            return None
        choices = self.search.choices
        bucket, depth = divmod(proposed % _MOST**2, _MOST)
        return StepSettings(choices.buckets_bytes[bucket], choices.prefetches[depth], self.search.leader.variant)
