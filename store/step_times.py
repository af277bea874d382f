"""What steps take, in one figure, and how sure a difference of two such figures is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

UNEVEN_RATIO: Final = 1.25
"""Where the mean of steps exceeds their median by this factor, few steps take much of the time."""
_BLOCK_STEPS: Final = 8
_N_RESAMPLES: Final = 1000
_MAX_RESAMPLED: Final = 4000


def typical(values: Sequence[float] | Array) -> float:
    """The median; the mean, where few steps take much of the time, as those do in which local SGD exchanges."""
    found = np.asarray(values, np.float64)
    return float(_center(found)(found))


@dataclass(frozen=True)
class TypicalChange:
    """Typical times before and after, and the 95 % interval of the change in percent."""

    before_us: float
    after_us: float
    percent: float
    low_percent: float
    high_percent: float


def change(before: Array, after: Array) -> TypicalChange:
    """What is typical, and a bootstrap over blocks of steps (neighbouring steps are not independent).

    Args:
        before: durations of steps (us).
        after: durations of other steps.

    Returns:
        The change from the first to the second.
    """
    chance = np.random.default_rng(0)
    center = _center(before, after)
    ratios = _resampled(before, center, chance), _resampled(after, center, chance)
    low, high = np.percentile(100 * (ratios[1] / ratios[0] - 1), [2.5, 97.5])
    before_us, after_us = float(center(before)), float(center(after))
    return TypicalChange(before_us, after_us, 100 * (after_us / before_us - 1), float(low), float(high))


def _center(*of: Array) -> Callable[..., Any]:
    are_uneven = any(np.mean(values) > UNEVEN_RATIO * np.median(values) for values in of)
    return np.mean if are_uneven else np.median


def _resampled(values: Array, center: Callable[..., Any], chance: np.random.Generator) -> Array:
    values = values[:: -(-len(values) // _MAX_RESAMPLED)]  # a long run's interval is narrow enough
    length = max(1, min(_BLOCK_STEPS, len(values) // 4))  # few blocks would show no spread
    n_blocks = -(-len(values) // length)
    starts = chance.integers(0, len(values) - length + 1, (_N_RESAMPLES, n_blocks, 1))
    taken = values[starts + np.arange(length)].reshape(_N_RESAMPLES, -1)[:, : len(values)]
    return np.asarray(center(taken, axis=1))
