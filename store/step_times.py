"""What steps take, in one figure, and how sure a difference of two such figures is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

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
        """Whether the interval excludes no change at all, and what floats make of it."""
        return self.low_percent > ROUNDING_PERCENT or self.high_percent < -ROUNDING_PERCENT


def change(name: str, before: Array, after: Array) -> MedianChange:
    """Medians, and a bootstrap over blocks of steps (neighbouring steps are not independent).

    Args:
        name: of what is compared.
        before: durations of steps (us).
        after: durations of other steps.

    Returns:
        The change from the first to the second.
    """
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
