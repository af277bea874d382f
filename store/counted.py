"""A number and what is counted, in words."""

from __future__ import annotations


def counted(n: int, one: str, many: str = "") -> str:
    """A number with its noun.

    Args:
        many: its plural; empty: an s more.

    Returns:
        Such as "1 row", or "1,200 rows".
    """
    return f"{n:,} {one if n == 1 else many or one + 's'}"
