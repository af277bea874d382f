"""A number and what is counted, in words."""

from __future__ import annotations


def counted(n: int, one: str, many: str = "") -> str:
    """For example `1 row` and `1,200 rows`; `many` is the plural, where that is not `one` with an s."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"
