"""Types of options' values; any other value ends a benchmark with a message (exit code 2) before it begins."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Final

MOST: Final = 1_000_000_000
"""No benchmark ends with a larger number, and random seeds need none."""


def whole(least: int = 0, most: int = MOST) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {least} or more")
        if len(text) > len(str(most)) or int(text) > most:
            raise argparse.ArgumentTypeError(f"{text[:40]} is too large: {most:,} at most")
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is too small: {least} at least")
        return int(text)

    return number


natural: Final = whole()
"""A count, which may be 0, or a seed."""
positive: Final = whole(1)


def a_folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder; name the one that holds the files")
    return path


def a_file_to_write(text: str) -> Path:
    """A file that can be written, which is tried before the work begins. Its content is kept until then."""
    path = Path(text)
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}; name another file") from None
    return path
