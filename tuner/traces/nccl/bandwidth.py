"""Whether a row's time, size and bandwidth fit together: a time in another unit shows, and so does a damaged number."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MARGIN: Final = 0.1
"""Means over runs, and GiB/s taken for GB/s, differ by less; another unit of time by a thousand."""
_LAST_DIGIT_GBS: Final = 0.01
"""Bandwidths are printed with two places."""
_BYTES_PER_US: Final = 1e3
"""Of one GB/s."""


def contradict(message_bytes: ArrayLike, duration_us: ArrayLike, algbw_gbs: ArrayLike) -> NDArray[np.bool_]:
    """Which times are not those of their size at the algorithm bandwidth beside them.

    Args:
        message_bytes: total bytes, shape (n,).
        duration_us: times, shape (n,).
        algbw_gbs: algorithm bandwidths as printed, shape (n,); NaN: unknown, which contradicts nothing.

    Returns:
        Shape (n,).
    """
    expected, printed = np.asarray(message_bytes) / (_BYTES_PER_US * np.asarray(duration_us)), np.asarray(algbw_gbs)
    wrong: NDArray[np.bool_] = np.abs(printed - expected) > _MARGIN * np.maximum(expected, printed) + _LAST_DIGIT_GBS
    return wrong


def shown(message_bytes: int, duration_us: float, algbw_gbs: float) -> str:
    """A row's three numbers, as an example of those that contradict each other.

    Args:
        message_bytes: total bytes.
        duration_us: the time.
        algbw_gbs: the algorithm bandwidth.

    Returns:
        One phrase.
    """
    return f"{message_bytes} bytes in {duration_us:g} us at {algbw_gbs:g} GB/s"
