"""Numbers in words."""

from __future__ import annotations


def counted(n: int, one: str, many: str = "") -> str:
    """A number with its noun, such as "1 row" or "1,200 rows"; without `many`, the plural has an s."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def faster(change_percent: float, digits: int = 0) -> str:
    """A change of a duration in percent, in words: "12 % faster", "3 % slower", or "as fast"."""
    if not change_percent:
        return "as fast"
    return f"{abs(change_percent):.{digits}f} % {'faster' if change_percent <= 0 else 'slower'}"


def size_text(n_bytes: int) -> str:
    """A number of bytes with a binary unit, rounded."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n_bytes >= 1 << shift:
            return f"{n_bytes / (1 << shift):.4g} {unit}"
    return f"{n_bytes} B"
