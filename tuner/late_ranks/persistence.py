"""Separates persistent excess from chance, by how often each column exceeds a limit.

A column is a rank, a node or a communicator. A column is named if it exceeds the limit in most steps. Among the steps
with an excess in its group, it must also do so more often than by chance (`sequential_test`). Noise makes it exceed in
at most half of the steps, since excess is counted from the median of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .sequential_test import SequentialTest

KEPT_STEPS: Final = 512
LEAST_STEPS: Final = 64
"""Least observed steps before a column is named."""
GROUP_BITS: Final = 16
"""The bits of a column above these are its group: the members of one communicator."""
RECENT_STEPS: Final = 32
OVER_BELOW: Final = 0.3
"""An excess has ended if fewer of the recent steps have it. The share is below half for hysteresis."""
OPEN_STEPS: Final = 2
"""The newest steps are not judged, since some of their calls may still be missing."""
BEGUN_ANEW_STEPS: Final = 100_000
"""No late record is this far behind the newest: the job counts its steps from 0 again."""
MAX_COLUMNS: Final = 4096


@dataclass(frozen=True)
class Excess:
    """A column that persistently exceeds."""

    column: int
    excess_us: float
    """Median over the steps in which it exceeded the limit."""
    usual_us: float
    """Median over the newest `LEAST_STEPS` steps, with and without excess: the usual delay of others."""
    share: float
    """Share of the steps since it began (at least `LEAST_STEPS`) in which it exceeded the limit."""
    since_step: int
    last_step: int
    is_proven: bool = True
    """It exceeds more often than chance allows."""
    goes_on: bool = True
    """It exceeds in over half of the recent steps. If not, it may be ending, and no new rank is named for it."""


class ExcessWindow:
    """Excess by step and column in the last steps, and the columns that persist."""

    def __init__(self) -> None:
        n_rows = KEPT_STEPS + OPEN_STEPS
        self._steps = np.full(n_rows, -1, np.int64)
        self._values = np.full((n_rows, 0), np.nan)
        self._newest = -1
        self._columns: dict[int, int] = {}
        self._named: dict[int, tuple[int, int]] = {}
        """By column, the first step of its excess, and the number of steps that proved it."""
        self._test, self._judged = SequentialTest(), -1

    def add(self, step: int, columns: NDArray[np.int64], excess_us: NDArray[np.float64]) -> None:
        """Add to the excess of some columns in a step; columns may repeat, and steps come in any order.

        Args:
            step: one too old to be judged is left out, and one far behind begins a new count.
        """
        if step < self._newest - BEGUN_ANEW_STEPS:
            self._steps[:] = -1
            self._values[:] = np.nan
            self._newest = self._judged = -1
            self._test = SequentialTest()
        row = self._row(step)
        if row is None:
            return
        unique, inverse = np.unique(columns, return_inverse=True)
        places = np.array([self._columns.setdefault(one, len(self._columns)) for one in unique.tolist()])[inverse]
        if (n_more := min(len(self._columns), MAX_COLUMNS) - self._values.shape[1]) > 0:
            self._values = np.hstack([self._values, np.full((len(self._values), n_more), np.nan)])
        fits = places < MAX_COLUMNS
        places, excess_us = places[fits], excess_us[fits]
        values = self._values[row]
        values[places] = np.nan_to_num(values[places])
        np.add.at(values, places, excess_us)

    def _row(self, step: int) -> int | None:
        found = np.flatnonzero(self._steps == step)
        if len(found):
            return int(found[0])
        oldest = int(np.argmin(self._steps))
        if step < self._steps[oldest]:
            return None
        self._steps[oldest], self._newest = step, max(self._newest, step)
        self._values[oldest] = np.nan
        return oldest

    def persistent(self, limit_us: float) -> list[Excess]:
        """Columns that exceed `limit_us` persistently and still do, the largest excess first."""
        return [one for one in self.going_on(limit_us) if one.is_proven]

    def going_on(self, limit_us: float) -> list[Excess]:
        """Persistent columns, and others that exceed it in over half of the recent steps, perhaps by chance."""
        order = np.argsort(self._steps)
        order = order[self._steps[order] >= 0][:-OPEN_STEPS]
        if not len(order):
            return []
        steps, values = self._steps[order], self._values[order]
        seen = np.isfinite(values)
        late = seen & (np.nan_to_num(values) > limit_us)
        n_recent, late_recent = seen[-RECENT_STEPS:].sum(0), late[-RECENT_STEPS:].sum(0)
        is_on = (late_recent > 0) & (late_recent >= OVER_BELOW * n_recent)
        is_proven = self._judge(steps, late, seen)
        over = is_proven & ~is_on
        is_proven &= is_on & (seen.sum(0) >= LEAST_STEPS)
        found = []
        for column, place in self._columns.items():
            if place >= late.shape[1] or not is_on[place]:
                self._named.pop(column, None)
                continue
            since, n_steps = self._named.get(column, (int(steps[_begin(late[:, place], seen[:, place])]), 0))
            n_since = max(LEAST_STEPS, int((steps >= since).sum()))
            # A named column stays while as many steps as proved it show an excess: noise makes a column exceed, too.
            goes_on = bool(late_recent[place] > 0.5 * n_recent[place])
            is_named = bool(n_steps or is_proven[place]) and _share(late, seen, place, n_steps or n_since) > 0.5
            if is_named:
                self._named[column] = since, n_steps or n_since
            else:
                over[place] |= self._named.pop(column, None) is not None
                if not goes_on:
                    continue
            at = np.flatnonzero(late[:, place])
            excess_us = float(np.median(values[at, place]))
            usual_us = float(np.median(values[seen[:, place], place][-LEAST_STEPS:]))
            share = _share(late, seen, place, n_since)
            found.append(Excess(column, excess_us, usual_us, share, since, int(steps[at[-1]]), is_named, goes_on))
        self._test.forget(over)
        return sorted(found, key=lambda one: -one.excess_us)

    def _judge(self, steps: NDArray[np.int64], late: NDArray[np.bool_], seen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Give new steps to the test; return whether each column is proven."""
        columns = np.array(list(self._columns)[: late.shape[1]], np.int64)
        _, group, n_of_group = np.unique(columns >> GROUP_BITS, return_inverse=True, return_counts=True)
        new = steps > self._judged
        late, seen = late[new], seen[new]
        order = np.argsort(group, kind="stable")
        any_late = np.logical_or.reduceat(late[:, order], np.cumsum(n_of_group) - n_of_group, axis=1)
        self._test.observe(late, seen & any_late[:, group], n_of_group[group])
        self._judged = int(steps[-1])
        return self._test.is_proven()


def _share(late: NDArray[np.bool_], seen: NDArray[np.bool_], place: int, n_steps: int) -> float:
    """Share of the newest steps in which a column was late."""
    return float(late[-n_steps:, place].sum() / max(1, seen[-n_steps:, place].sum()))


def _begin(late: NDArray[np.bool_], seen: NDArray[np.bool_]) -> int:
    """The first row of the period in which a column is late most clearly in over half of the steps."""
    signs = np.where(late, 1.0, np.where(seen, -1.0, 0.0))
    return int(np.argmax(np.cumsum(signs[::-1])[::-1]))
