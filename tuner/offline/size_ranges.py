"""Sizes and ranges of them as text."""

from __future__ import annotations

from rich.filesize import decimal


def rounded_range(low_bytes: int, high_bytes: int, to: str = " to ") -> str:
    """A range of sizes, rounded; one size where both ends are then equal.

    Returns:
        Text such as "1.0 MB to 1.2 MB".
    """
    low, high = decimal(low_bytes), decimal(high_bytes)
    return low if low == high else f"{low}{to}{high}"


def exact_range(low_bytes: int, high_bytes: int) -> str:
    """An exact range, such as "1,048,576 to 1,246,974"; one size where both ends are equal."""
    return f"{low_bytes:,}" if low_bytes == high_bytes else f"{low_bytes:,} to {high_bytes:,}"


def size_text(n_bytes: int) -> str:
    """A number of bytes with a binary unit, rounded."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n_bytes >= 1 << shift:
            return f"{n_bytes / (1 << shift):.4g} {unit}"
    return f"{n_bytes} B"
