"""Temporary folders that kill -9 does not leave behind for good: the next folder of the same prefix removes them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType


class ScratchFolder:
    """A private temporary folder; a context manager.

    Its owner holds a lock on it, which the kernel frees however the process ends: a folder without a lock is unused.
    Unused folders of the same `prefix` and user are removed at the start.
    """

    def __init__(self, prefix: str) -> None:
        _remove_leftovers(prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            descriptor = _locked(self.path)
            if descriptor is not None and self.path.exists():
                self._descriptor = descriptor
                return
            # Another process took it for a leftover before it was locked.
            if descriptor is not None:
                os.close(descriptor)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove it; harmless when done already."""
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1


def _remove_leftovers(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            is_ours = path.lstat().st_uid == os.getuid()
        except FileNotFoundError:
            continue
        descriptor = _locked(path) if is_ours else None
        if descriptor is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where another has it, or it is no folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
