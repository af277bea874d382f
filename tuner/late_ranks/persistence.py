"""Tells what persists over steps from chance, by how often each column's excess is over a limit that matters.

A column is a rank, a node or a communicator. Named is what exceeds the limit in more of the steps of late than chance
allows for. Noise of every step makes a column exceed in half of them at most, since excess is counted from the median
of the others. Events that last several steps and hit one column after another give each its share of the steps in which
any column of its group exceeds: of two ranks, one that is late in three steps of four while the other never is does not
take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

WINDOWS: Final = (64, 128, 256, 512)
"""Observed steps that are judged together: short ones see a change soon, long ones what is late less often."""
LEAST_STEPS: Final = 64
CHANCE_STEPS: Final = 8
"""Steps that a chance event lasts, such as another process that computes: so many count as one sample."""
Z: Final = 4.0
"""Standard deviations beyond chance: there are many ranks, and this is asked many times."""
GROUP_BITS: Final = 16
"""What columns have in common above these bits is their group: the members of one communicator."""
RECENT_STEPS: Final = 32
OVER_BELOW: Final = 0.3
"""What exceeded in a smaller share of the recent steps is over. Less than `named`, so that nothing flickers."""
OPEN_STEPS: Final = 2
"""The newest steps are not judged: calls of them may still be missing."""
BEGUN_ANEW_STEPS: Final = 100_000
"""So far behind the newest lies no late record: the job counts its steps from 0 again."""
MAX_COLUMNS: Final = 4096


@dataclass(frozen=True)
class Excess:
    """A column that persistently exceeds."""

    column: int
    excess_us: float
    """Median over the steps in which it exceeded the limit."""
    share: float
    """Of the steps of the window in which it stood out most clearly."""
    since_step: int
    last_step: int
    is_proven: bool = True
    """More than chance allows for."""


class ExcessWindow:
    """Excess by step and column, of the last steps; and which columns persist."""

    def __init__(self) -> None:
        n_rows = max(WINDOWS) + OPEN_STEPS
        self._steps = np.full(n_rows, -1, np.int64)
        self._values = np.full((n_rows, 0), np.nan)
        self._newest = -1
        self._columns: dict[int, int] = {}
        self._named: dict[int, tuple[int, int]] = {}
        """By column: since which step, and the length of the shortest window that has proven it."""

    def add(self, step: int, columns: NDArray[np.int64], excess_us: NDArray[np.float64]) -> None:
        """Add to the excess of some columns in a step; columns may repeat, and steps come in any order.

        Args:
            step: its number; one too old to be judged is left out, and one far behind begins anew.
            columns: any integers, shape (n,).
            excess_us: shape (n,).
        """
        if step < self._newest - BEGUN_ANEW_STEPS:
            self._steps[:] = -1
            self._values[:] = np.nan
            self._newest = -1
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

    def _chance(self, late: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Steps in which any column of a place's group exceeds (as `late`), and the share of them it has by turns."""
        columns = np.array(list(self._columns)[: late.shape[1]], np.int64)
        _, group, n_of_group = np.unique(columns >> GROUP_BITS, return_inverse=True, return_counts=True)
        order = np.argsort(group, kind="stable")
        any_late = np.logical_or.reduceat(late[:, order], np.cumsum(n_of_group) - n_of_group, axis=1)
        return any_late[:, group], 1.0 / np.maximum(n_of_group, 2)[group]

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
        """Those, and columns that exceed it in more than half of the recent steps, be it by chance; sorted likewise."""
        order = np.argsort(self._steps)
        order = order[self._steps[order] >= 0][:-OPEN_STEPS]
        if not len(order):
            return []
        steps, values = self._steps[order], self._values[order]
        seen = np.isfinite(values)
        late = seen & (np.nan_to_num(values) > limit_us)
        n_recent, late_recent = seen[-RECENT_STEPS:].sum(0), late[-RECENT_STEPS:].sum(0)
        goes_on = (late_recent > 0) & (late_recent >= OVER_BELOW * n_recent)
        named: dict[int, tuple[float, int]] = {}
        in_most: dict[int, NDArray[np.bool_]] = {}
        any_late, by_chance = self._chance(late)
        for n_window in WINDOWS:
            n, k, n_any = (of[-n_window:].sum(0) for of in (seen, late, any_late & seen))
            n_steps, n_any = np.maximum(n, 1), np.maximum(n_any, 1)
            share = k / n_steps
            spread = np.sqrt(by_chance * (1.0 - by_chance) * CHANCE_STEPS / n_any)
            stands_out = (n >= LEAST_STEPS) & goes_on & (k / n_any > by_chance + Z * spread)
            stands_out &= share > 0.5 + Z * np.sqrt(0.25 / n_steps)
            in_most[n_window] = share > 0.5
            for place in np.flatnonzero(stands_out).tolist():
                most, shortest = named.get(place, (0.0, n_window))
                named[place] = max(most, float(share[place])), shortest
        found = []
        for column, place in self._columns.items():
            if place >= late.shape[1] or not goes_on[place]:
                self._named.pop(column, None)
                continue
            at = np.flatnonzero(late[:, place])
            share, window = named.get(place, (float(late[-64:, place].sum() / max(1, seen[-64:, place].sum())), 0))
            since, shortest = self._named.get(column, (int(steps[_begin(late[:, place], seen[:, place])]), window))
            window = min(window or shortest, shortest)
            # What it was named for goes on as long as that window says so: noise makes a column exceed, too.
            is_proven = place in named or bool(window and in_most[window][place])
            if is_proven:
                self._named[column] = since, window
            else:
                self._named.pop(column, None)
                if late_recent[place] <= 0.5 * n_recent[place]:
                    continue
            excess_us = float(np.median(values[at, place]))
            found.append(Excess(column, excess_us, share, since, int(steps[at[-1]]), is_proven))
        return sorted(found, key=lambda one: -one.excess_us)


def _begin(late: NDArray[np.bool_], seen: NDArray[np.bool_]) -> int:
    """The row from which on it has been late most clearly more often than not."""
    signs = np.where(late, 1.0, np.where(seen, -1.0, 0.0))
    return int(np.argmax(np.cumsum(signs[::-1])[::-1]))
