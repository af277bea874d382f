"""Ranges of sizes as text."""

from __future__ import annotations

from rich.filesize import decimal


def rounded_range(low_bytes: int, high_bytes: int, to: str = " to ") -> str:
    """A rounded range, such as "1.0 MB to 1.2 MB"; one size where both ends are equal."""
    low, high = decimal(low_bytes), decimal(high_bytes)
    return low if low == high else f"{low}{to}{high}"


def exact_range(low_bytes: int, high_bytes: int) -> str:
    """An exact range, such as "1,048,576 to 1,246,974"; one size where both ends are equal."""
    return f"{low_bytes:,}" if low_bytes == high_bytes else f"{low_bytes:,} to {high_bytes:,}"
