"""What benchmarks take as a value of an option; anything else ends them with a message (2)."""

from __future__ import annotations

import argparse


def natural(text: str) -> int:
    """A whole number, 0 or more: how many of something, or a seed."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return int(text)
