"""Numbers in words."""

from __future__ import annotations


def counted(n: int, one: str, many: str = "") -> str:
    """A number with its noun.

    Args:
        many: its plural; empty: an s more.

    Returns:
        Such as "1 row", or "1,200 rows".
    """
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def faster(change_percent: float, digits: int = 0) -> str:
    """A change of time in percent, of which less is faster: "12 % faster", "3 % slower", or "as fast"."""
    if not change_percent:
        return "as fast"
    return f"{abs(change_percent):.{digits}f} % {'faster' if change_percent <= 0 else 'slower'}"
