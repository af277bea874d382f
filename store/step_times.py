"""Differences of step times with their intervals: of neighbouring steps in one job, and of two runs.

Step times drift for reasons other than plans. So each control window, two steps of NCCL's own choice, is compared only
with the four steps on either side: drift cancels, and longer changes affect both. Each of these *blocks* gives one
difference; many give a mean, and an interval by Student's t. `python -m benchmarks gain_interval` measures how often
that interval holds the true gain.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .records import StepRecord

Array = NDArray[Any]

ROUNDING_PERCENT: Final = 1e-6
"""A change this small is rounding: two sums of the same times."""
_BLOCK_STEPS: Final = 8
_N_RESAMPLES: Final = 1000
_MAX_RESAMPLED: Final = 4000


@dataclass(frozen=True)
class MedianChange:
    """Medians before and after, and the 95 % interval of the change in percent."""

    name: str
    before_us: float
    after_us: float
    percent: float
    low_percent: float
    high_percent: float

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the interval excludes zero, apart from rounding."""
        return self.low_percent > ROUNDING_PERCENT or self.high_percent < -ROUNDING_PERCENT


def change(name: str, before: Array, after: Array) -> MedianChange:
    """The change of step times (us), with a bootstrap over blocks of steps: neighbouring steps are not independent."""
    chance = np.random.default_rng(0)
    ratios = _resampled_medians(before, chance), _resampled_medians(after, chance)
    low, high = np.percentile(100 * (ratios[1] / ratios[0] - 1), [2.5, 97.5])
    before_us, after_us = float(np.median(before)), float(np.median(after))
    return MedianChange(name, before_us, after_us, 100 * (after_us / before_us - 1), float(low), float(high))


def _resampled_medians(values: Array, chance: np.random.Generator) -> Array:
    values = values[:: -(-len(values) // _MAX_RESAMPLED)]  # a long run's interval is narrow enough
    length = max(1, min(_BLOCK_STEPS, len(values) // 4))  # few blocks would show no spread
    n_blocks = -(-len(values) // length)
    starts = chance.integers(0, len(values) - length + 1, (_N_RESAMPLES, n_blocks, 1))
    taken = values[starts + np.arange(length)].reshape(_N_RESAMPLES, -1)[:, : len(values)]
    return np.asarray(np.median(taken, axis=1))


NEIGHBOURS: Final = 4
"""Steps on either side of a control window that run the usual settings."""
COMPARED: Final = 3
"""Neighbours that a window is compared with: the first step under a plan may be mixed, and is not whole."""
MOST_APART: Final = 20
"""A block whose first and last step are further apart has lost steps, and is dropped."""
LEAST_BLOCKS: Final = 4
"""Fewer blocks give no result."""
MOST_BLOCKS: Final = 256
"""The newest blocks are kept."""
ROUGH: Final = 4.0
"""Standard deviations by which a step (a checkpoint, say) is an outlier; its block is left out."""
LEAST_SCATTER: Final = 1e-4
"""Least assumed standard deviation of steps (log), as steps of an emulation do not scatter at all."""
Z: Final = 2.8
"""Quantile for 99.5 %: blocks are fewer and more alike than Student's t assumes; 1 % of claims may be false."""


@dataclass(frozen=True)
class Saved:
    """Share of NCCL's own step time that is saved, with an interval that holds the true share in 95 of 100 jobs."""

    share: float
    low_share: float
    high_share: float
    n_windows: int
    """Compared control windows."""
    own_us: float
    """Geometric mean of step times under NCCL's own choice, over the windows."""

    @property
    def uncertain_share(self) -> float:
        """Half of the interval."""
        return (self.high_share - self.low_share) / 2.0

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the interval excludes zero, apart from rounding."""
        return 100 * self.low_share > ROUNDING_PERCENT or 100 * self.high_share < -ROUNDING_PERCENT


Block = list[float]
"""Log durations of a window's first and last step, and of its neighbours."""


class SideBySide:
    """Takes steps in their order, and keeps the blocks of control windows and neighbours."""

    def __init__(self) -> None:
        self._blocks: deque[Block] = deque(maxlen=MOST_BLOCKS)
        self._latest: deque[StepRecord] = deque(maxlen=NEIGHBOURS)
        """Latest steps under plans."""
        self._open: tuple[list[StepRecord], list[StepRecord], list[StepRecord]] | None = None
        """Steps before, in and after the last window, until enough steps follow it."""
        self._is_current = True
        self._saved: Saved | None = None

    @property
    def n_windows(self) -> int:
        """Windows with enough neighbours on either side."""
        return len(self._blocks)

    def add(self, step: StepRecord, *, is_control: bool) -> None:
        """Add a step; `is_control`: its plan was a control window's."""
        if step.epoch == 0:  # no plan was in force
            self._latest.clear()
            self._open = None
        elif not step.is_whole or step.duration_us <= 0.0:
            return
        elif is_control:
            if self._open is None or self._open[2]:
                self._open = [*self._latest], [], []
            if len(self._open[1]) < MOST_APART:
                self._open[1].append(step)
        else:
            self._latest.append(step)
            if self._open is not None:
                self._open[2].append(step)
                if len(self._open[2]) == NEIGHBOURS:
                    self._close(*self._open)

    def _close(self, before: list[StepRecord], window: list[StepRecord], after: list[StepRecord]) -> None:
        self._open = None
        # Steps under other plans than the window's neighbours may have run a trial.
        before = [one for one in before if one.epoch == before[-1].epoch][-COMPARED:]
        after = [one for one in after if one.epoch == after[0].epoch][:COMPARED]
        is_whole = len(before) == len(after) == COMPARED
        if is_whole and after[-1].step - before[0].step <= MOST_APART:
            steps = (window[0], window[-1], *before, *after)
            self._blocks.append([math.log(one.duration_us) for one in steps])
            self._is_current = False

    def saved(self) -> Saved | None:
        """The gain over all windows; None if there are too few."""
        if not self._is_current:
            self._is_current = True  # before the blocks are read, as another thread may add one meanwhile
            self._saved = _saving_of([*self._blocks])
        return self._saved


def _saving_of(blocks: list[Block]) -> Saved | None:
    if len(blocks) < LEAST_BLOCKS:
        return None
    if len(blocks) >= 4 * LEAST_BLOCKS:
        del blocks[:LEAST_BLOCKS]  # of the time before most settings were in force
    steps = np.array(blocks)
    own = steps[:, :2].mean(axis=1)
    differences = own - steps[:, 2:].mean(axis=1)
    steps[:, :2] -= np.median(differences)  # as outliers are as likely in a window
    apart = np.abs(steps - np.median(steps, axis=1, keepdims=True))
    smooth = apart.max(axis=1) <= ROUGH * max(LEAST_SCATTER, 1.4826 * float(np.median(apart)))
    if np.count_nonzero(smooth) >= LEAST_BLOCKS:
        differences = differences[smooth]
    mean, n_blocks = float(differences.mean()), len(differences)
    half = _quantile(n_blocks - 1) * float(differences.std(ddof=1)) / math.sqrt(n_blocks)
    share, low, high = (-math.expm1(-log) for log in (mean, mean - half, mean + half))
    return Saved(share, low, high, n_blocks, math.exp(float(own.mean())))


def _quantile(freedom: int) -> float:
    """Student's t with the tail probability of `Z` in a normal distribution, by Cornish and Fisher's series."""
    terms: tuple[float, ...] = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    return Z + sum(term / float(freedom**order) for order, term in enumerate(terms, 1))
