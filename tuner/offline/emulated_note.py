"""The note of every table with emulated times."""

from __future__ import annotations


def emulated_note(fabric: str) -> str:
    """A sentence in rich's markup about times of the emulated `fabric`."""
    return f"[yellow]Emulated fabric {fabric}[/]: times are a virtual clock's, they say nothing about real NCCL."
