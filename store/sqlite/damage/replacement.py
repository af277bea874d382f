"""Puts a new file in the place of a damaged store, which is kept; an interruption at any point loses nothing.

The new file is written beside the store, as STORE.new-STAMP.partial. It is called STORE.new-STAMP once it is whole and
on disk: from then on the next process that opens the store for writing completes the replacement.
"""

from __future__ import annotations

import glob
import re
import time
from pathlib import Path
from typing import Final

from ...atomic_file import sync_folder

SIDE_FILES: Final = ("-wal", "-shm", "")
"""In the order of moving them: a new file must never lie beside an old log, which SQLite would apply to it."""
_ASIDE: Final = ".corrupt-"
_NEW: Final = ".new-"
_PARTIAL: Final = ".partial"
_STAMP: Final = re.compile(r"\d{8}-\d{6}(-\d+)?")


def free_stamp(path: Path) -> str:
    """The time as a part of names, none of which exists yet beside the store at `path`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    stamps = [stamp] + [f"{stamp}-{n}" for n in range(2, 1000)]
    return next(one for one in stamps if not any(_with(set_aside(path, one), side).exists() for side in SIDE_FILES))


def set_aside(path: Path, stamp: str) -> Path:
    """Path at which the damaged file is kept."""
    return _with(path, _ASIDE + stamp)


def is_set_aside(path: Path) -> bool:
    """Whether a file's name is that of a kept damaged store."""
    return _ASIDE in path.name


def partial_file(path: Path, stamp: str) -> Path:
    """Path at which the new file is written."""
    return _with(path, _NEW + stamp + _PARTIAL)


def declare_whole(path: Path, stamp: str) -> None:
    """Rename the new file, which is complete, on disk, and closed."""
    partial_file(path, stamp).rename(_with(path, _NEW + stamp))
    sync_folder(path.parent)


def unfinished(path: Path) -> str | None:
    """The stamp of a complete new file that is not in its place yet."""
    begin = path.name + _NEW
    stamps = sorted(one.name.removeprefix(begin) for one in path.parent.glob(glob.escape(begin) + "*"))
    return next((one for one in stamps if _STAMP.fullmatch(one)), None)


def put_in_place(path: Path, stamp: str) -> Path:
    """Keep the file at `path` under another name, which is returned, and move the new file there.

    After an `OSError` nothing is lost, and this may be called again.
    """
    aside = set_aside(path, stamp)
    for side in SIDE_FILES:
        if (old := _with(path, side)).exists():
            old.rename(_with(aside, side))
    sync_folder(path.parent)  # the old log must have lost its name before the new file gets the store's
    _with(path, _NEW + stamp).rename(path)
    sync_folder(path.parent)
    return aside


def clear(path: Path) -> None:
    """Remove the files of an incomplete replacement."""
    for partial in path.parent.glob(glob.escape(path.name + _NEW) + "*" + _PARTIAL + "*"):
        partial.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a store and its side files."""
    for side in SIDE_FILES:
        _with(path, side).unlink(missing_ok=True)


def _with(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
