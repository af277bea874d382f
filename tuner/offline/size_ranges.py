"""Ranges of sizes as text."""

from __future__ import annotations

from ...store.counted import size_text


def rounded_range(low_bytes: int, high_bytes: int, to: str = " to ") -> str:
    """A rounded range such as "1 MiB to 1.189 MiB"; one size if both ends are then equal."""
    low, high = size_text(low_bytes), size_text(high_bytes)
    return low if low == high else f"{low}{to}{high}"


def exact_range(low_bytes: int, high_bytes: int) -> str:
    """An exact range, such as "1,048,576 to 1,246,974"; one size if both ends are equal."""
    return f"{low_bytes:,}" if low_bytes == high_bytes else f"{low_bytes:,} to {high_bytes:,}"
