"""Files that are written in one piece, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Where to write what is `path` once it is whole; on a full disk nothing is left behind, and what was there stays.

    A pipe or a device is written to as it is.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    whole = Path(os.path.realpath(path))  # a link goes on being one
    partial = whole.with_name(whole.name + ".partial")
    try:
        yield partial
        partial.replace(whole)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
