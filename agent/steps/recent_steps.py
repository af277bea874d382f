"""The latest steps, and the time they save against NCCL's own choice."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import islice
from statistics import median
from typing import Final

from ...store.records import StepRecord
from ...store.step_times import Saved, SideBySide

N_LATEST: Final = 64
N_KEPT: Final = 256


class RecentSteps:
    """Written by the training thread, read by any other; `is_control` tells whether an epoch is a control window."""

    def __init__(self, is_control: Callable[[int], bool] = lambda _: False) -> None:
        self._is_control = is_control
        self._latest: deque[StepRecord] = deque(maxlen=N_KEPT)
        self._side_by_side = SideBySide()
        self._n_seen = 0

    def add(self, record: StepRecord) -> None:
        """One finished step."""
        self._n_seen += 1
        self._latest.append(record)
        self._side_by_side.add(record, is_control=record.epoch > 0 and self._is_control(record.epoch))

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
        """Number of kept whole steps by the epoch of their plan; 0: no plan."""
        return Counter(one.epoch for one in _copied(self._latest) if one.is_whole)

    def saved(self) -> Saved | None:
        """Time saved against NCCL's own choice, from control windows; None while these are too few."""
        return self._side_by_side.saved()


def _copied(steps: deque[StepRecord]) -> list[StepRecord]:
    """A copy, though another thread appends; empty in the unlikely case that it changes during each of four tries."""
    for _ in range(4):
        try:
            return list(islice(steps, N_KEPT))
        except RuntimeError:  # changed during iteration
            continue
    return []
