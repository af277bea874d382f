"""Temporary folders that are removed even after kill -9: by the next folder of the same prefix."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ScratchFolder:
    """A private temporary folder; a context manager.

    Its owner holds a lock on it, which the kernel frees however the process ends: a folder without a lock is unused.
    Unused folders of the same `prefix` and user are removed at the start, if there are locks on that file system.

    Without `within`, it is in the system's folder for temporary files.
    """

    def __init__(self, prefix: str, within: str | None = None) -> None:
        _remove_leftovers(prefix, within)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=within))
            with contextlib.suppress(FileNotFoundError):
                self._descriptor = os.open(self.path, _FOLDER)
                if _lock(self._descriptor) is not False and self.path.exists():
                    return
                os.close(self._descriptor)
            # Another process took it for a leftover before it was locked.

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove it; may be called twice."""
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1


def _remove_leftovers(prefix: str, within: str | None) -> None:
    for path in Path(within or tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            if path.lstat().st_uid != os.getuid():
                continue
            descriptor = os.open(path, _FOLDER)
        except OSError:  # it has gone, or is no folder
            continue
        if _lock(descriptor):
            shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether the file is locked by us from now on; None: its file system has no locks, as NFS may have none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
