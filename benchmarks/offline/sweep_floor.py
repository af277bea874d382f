"""What even a sweep that knows far too much would lose, to judge the active one by.

It is told the two truly best settings of every place and, of each, how samples scatter; from that it works out how
many samples each place is worth, takes these, and chooses by the median. All that is kept from it is which of the two
is which. No sweep can know as much, so that where this one misses an aim, the samples are too few for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

MOST_SAMPLES = 40
"""Of one setting: more are not worth it to anybody."""
N_DRAWS = 2000


def curve(samples_us: tuple[np.ndarray, np.ndarray], gap: float) -> np.ndarray:
    """Mean regret of one place after 0, 1, ... samples of both settings, the best one's first."""
    wrong = [0.5]
    for n in range(1, MOST_SAMPLES + 1):
        best, other = (np.median(draws[:, :n], axis=1) for draws in samples_us)
        wrong.append(float(np.mean(other < best)))
    return gap * np.array(wrong)


def least_regret(curves: Sequence[np.ndarray], n_samples: float) -> float:
    """Mean regret over places when `n_samples` go where they save most."""
    if not curves:
        return 0.0
    taken = [0] * len(curves)
    steps = [(*_best_step(one, 0), at) for at, one in enumerate(curves)]
    heapq.heapify(steps)
    left = n_samples
    while steps:
        saving, n_more, at = heapq.heappop(steps)
        if saving >= 0:
            break
        if 2 * n_more > left:
            continue
        taken[at] += n_more
        left -= 2 * n_more
        heapq.heappush(steps, (*_best_step(curves[at], taken[at]), at))
    return float(np.mean([one[n] for one, n in zip(curves, taken, strict=True)]))


def _best_step(one: np.ndarray, n_taken: int) -> tuple[float, int]:
    """The step from `n_taken` that saves most per sample: (change of regret per sample, how many more)."""
    if n_taken + 1 >= len(one):
        return 0.0, 0
    slopes = (one[n_taken + 1 :] - one[n_taken]) / np.arange(1, len(one) - n_taken)
    best = int(np.argmin(slopes))
    return float(slopes[best]), best + 1
