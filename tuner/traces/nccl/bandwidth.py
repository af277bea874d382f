"""Whether a row's time, size and bandwidth fit together: a time in another unit shows, and so does a damaged number."""

from __future__ import annotations

from typing import Final

_MARGIN: Final = 0.1
"""Means over runs, and GiB/s taken for GB/s, differ by less; another unit of time by a thousand."""
_LAST_DIGIT_GBS: Final = 0.01
"""Bandwidths are printed with two places."""
_BYTES_PER_US: Final = 1e3
"""Of one GB/s."""


def contradiction(message_bytes: int, duration_us: float, algbw_gbs: float) -> str | None:
    """The row in words if its time is not its size by the algorithm bandwidth beside it; None if they agree."""
    expected_gbs = message_bytes / (_BYTES_PER_US * duration_us)
    if not abs(algbw_gbs - expected_gbs) > _MARGIN * max(expected_gbs, algbw_gbs) + _LAST_DIGIT_GBS:
        return None
    return f"{message_bytes} bytes in {duration_us:g} us at {algbw_gbs:g} GB/s"
