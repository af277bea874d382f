"""Reads files that a user names or others wrote: only regular files up to a size, and without ever waiting."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_file(path: Path, max_bytes: int, *, owner: int | None = None, follow: bool = True) -> bytes:
    """All bytes of a file.

    Args:
        owner: number of the user who must own it; None: any user.
        follow: whether it may be a symbolic link.

    Raises:
        OSError: it cannot be read, is a device, a pipe or a folder, is another user's, or has more than `max_bytes`.
    """
    data = _read(path, max_bytes + 1, owner, 0 if follow else os.O_NOFOLLOW)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return data


def begin_of(path: Path, n_bytes: int) -> bytes:
    """The first bytes of a file; raises `OSError` for a device, a pipe or a folder, too."""
    return _read(path, n_bytes, None, 0)


def _read(path: Path, n_bytes: int, owner: int | None, flags: int) -> bytes:
    # Without O_NONBLOCK, opening a pipe that nobody writes to would wait.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | flags)
    except ValueError as error:  # others gave the name, and no file's name can have such characters
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if owner is not None and found.st_uid != owner:
            raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}", str(path))
        return file.read(n_bytes)
