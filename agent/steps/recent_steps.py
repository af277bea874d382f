"""The latest steps, and what steps took at NCCL's own choice, for those who watch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Final, TypeVar

import numpy as np

from zerotune.store.records import StepRecord
from zerotune.store.step_times import change

Of = TypeVar("Of")
N_LATEST: Final = 64
N_KEPT: Final = 256
"""Steps that are kept, and so many of NCCL's own choice."""
N_WARMUP: Final = 5
"""First steps that compile, allocate and connect."""
N_LEAST: Final = 10
"""Fewer steps say nothing of a change."""


@dataclass(frozen=True)
class Saved:
    """By which share of their time steps under a plan are shorter, and half of the 95 % interval of that."""

    share: float
    uncertain_share: float


class RecentSteps:
    """Written by the training thread, read by any other."""

    def __init__(self) -> None:
        self._latest: deque[StepRecord] = deque(maxlen=N_KEPT)
        self._own_us: deque[float] = deque(maxlen=N_KEPT)
        self._n_seen = 0

    def add(self, record: StepRecord) -> None:
        """One finished step."""
        self._n_seen += 1
        self._latest.append(record)
        if record.is_whole and record.epoch == 0 and self._n_seen > N_WARMUP:
            self._own_us.append(record.duration_us)

    @property
    def last(self) -> StepRecord | None:
        """The newest step; None before the first."""
        return self._latest[-1] if self._latest else None

    @property
    def n_seen(self) -> int:
        """Steps that were seen to end."""
        return self._n_seen

    def step_us(self) -> float | None:
        """Median of the latest steps; None before the first."""
        latest = _copied(self._latest)[-N_LATEST:]
        return median(one.duration_us for one in latest) if latest else None

    def epochs(self) -> Counter[int]:
        """How many of the steps that are kept ran under which plan, 0: under none."""
        return Counter(one.epoch for one in _copied(self._latest) if one.is_whole)

    def saved_share(self) -> float | None:
        """By which share of their time the latest steps under a plan are shorter than those at NCCL's own choice.

        Negative where they are longer; None while either has fewer than N_LEAST steps. It is a plain difference of
        what is typical: what else has changed meanwhile is in it.
        """
        saved = self.saved()
        return None if saved is None else saved.share

    def saved(self, epochs: Collection[int] | None = None) -> Saved | None:
        """The same, and how sure it is; of the steps under the plans `epochs`, if they are given."""
        latest = _copied(self._latest)
        under = [one for one in latest[-N_LATEST:] if one.epoch] if epochs is None else latest
        planned = np.array(
            [one.duration_us for one in under if one.is_whole and (epochs is None or one.epoch in epochs)]
        )
        own = np.array(_copied(self._own_us))
        if min(len(planned), len(own)) < N_LEAST or not np.median(own):
            return None
        found = change("step time", own, planned)
        return Saved(-found.percent / 100, (found.high_percent - found.low_percent) / 200)


def _copied(steps: deque[Of]) -> list[Of]:
    """A copy, though another thread appends; empty in the unlikely case that it never stands still."""
    for _ in range(4):
        try:
            return list(islice(steps, N_KEPT))
        except RuntimeError:  # changed during iteration
            continue
    return []
