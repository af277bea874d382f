"""How late each rank was at each collective, from durations only: ranks' clocks are not compared.

All ranks leave a collective that reduces or gathers at about the same time, and a rank's duration begins with its own
arrival. So the difference between two ranks' durations is the difference between their arrivals.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...store.records import Collective

TOGETHER: Final = (Collective.all_gather, Collective.all_reduce, Collective.reduce_scatter)
"""Collectives that no rank leaves before all have arrived; a root may leave its broadcast before others come."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def behind_the_others(durations_us: Floats, starts: Ints) -> Floats:
    """Microseconds by which each value is below the median of the others in its group; 0 in groups of one.

    Values come group by group. `starts`, shape (m,), has the beginning of each group, ascending from 0. Late ranks have
    positive results.
    """
    counts = np.diff(np.append(starts, len(durations_us)))
    group = np.repeat(np.arange(len(starts)), counts)
    order = np.lexsort((durations_us, group))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - np.repeat(starts, counts)
    sorted_us = durations_us[order]
    n, first = counts[group], starts[group]
    # Without the value at `place`, the values after it move up by one.
    low, high = np.maximum(n - 2, 0) // 2, np.maximum(n - 1, 0) // 2
    top = np.maximum(n - 1, 0)
    middle = [sorted_us[first + np.minimum(at + (place <= at), top)] for at in (low, high)]
    return np.where(n > 1, (middle[0] + middle[1]) / 2 - durations_us, 0.0)


def medians(values: Floats, starts: Ints) -> Floats:
    """The median of each group of `values`; groups as in `behind_the_others`."""
    counts = np.diff(np.append(starts, len(values)))
    group = np.repeat(np.arange(len(starts)), counts)
    ordered = values[np.lexsort((values, group))]
    middle: Floats = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) / 2
    return middle
