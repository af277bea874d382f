"""What benchmarks take as a value of an option; anything else ends them with a message (2) before they begin."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

MOST: Final = 1_000_000_000
"""More than any benchmark ends with, or than random seeds are needed."""


def whole(least: int = 0, most: int = MOST) -> Callable[[str], int]:
    """Whole numbers from `least` to `most`."""

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
"""How many of something, which may be none, or a seed."""
positive: Final = whole(1)
"""How many of something, one at least."""


def share_of_noise(text: str) -> float:
    """The standard deviation of a logarithm: 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:  # neither is a NaN
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return value


def percent(text: str) -> float:
    """More than nothing, up to 100."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 100.0:  # neither is a NaN
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage above 0 and up to 100")
    return value


def a_folder(text: str) -> Path:
    """A folder that is there."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder; name the one that holds the files")
    return path


def a_file(text: str) -> Path:
    """A file that is there and can be read."""
    path = Path(text)
    try:
        path.open("rb").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {error.strerror}; name a file that can") from None
    return path


def a_file_to_write(text: str) -> Path:
    """A file that can be written, tried before the work of which it is to tell. What it holds is kept until then."""
    path = Path(text)
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}; name another file") from None
    return path


def a_folder_to_write(text: str) -> Path:
    """A folder that files can be written to; it is made if need be."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text} is no folder to write to: {error.strerror}; name another folder"
        ) from None
    return path


def a_fabric(text: str) -> str:
    """The name of a shipped fabric, or the path of a fabric file."""
    from zerotune.agent.nccl import fabric
    from zerotune.store.errors import UserError

    try:
        fabric.load(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
