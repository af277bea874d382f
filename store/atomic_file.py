"""Files that are written completely, or not at all."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .errors import UserError

LEFT_BEHIND_S: Final = 86_400.0
"""A partial file that nobody has written to for this long is left from a killed process."""
MAX_STEM_BYTES: Final = 200
"""Bytes of a file's name that its partial file's name repeats."""


@contextlib.contextmanager
def atomic_write(path: Path, mode: int | None = None) -> Iterator[Path]:
    """The path to write to; it replaces `path` when the block ends.

    If anything fails, `path` stays as it was and nothing is left behind; otherwise the content is on disk. Several
    writers each write a whole file; the last one's stays. A pipe or a device is written to directly. `OSError` also
    means that another user has put a link or a pipe there.

    Args:
        mode: the file's permissions; None: those of the file that is replaced, or the usual ones if there is none.
    """
    with contextlib.suppress(FileNotFoundError):
        # A pipe's reader may never come; a shell's own pipe has no path.
        for one, kind, what in ((path, stat.S_IFLNK, "link"), (os.path.realpath(path), stat.S_IFIFO, "pipe")):
            its = os.lstat(one)
            if stat.S_IFMT(its.st_mode) == kind and its.st_uid not in (0, os.geteuid()):
                raise PermissionError(errno.EPERM, f"user {its.st_uid} has put a {what} there", str(path))
    if path.exists() and not path.is_file():
        yield path
        return
    whole = Path(os.path.realpath(path))  # a link goes on being one
    stem = os.fsdecode(os.fsencode(whole.name)[:MAX_STEM_BYTES])
    partial = whole.with_name(f"{stem}.{os.urandom(4).hex()}.partial")
    usual = 0o666 if mode is None else mode
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, usual))
    try:
        _remove_left_behind(partial, stem)
        if mode is None and whole.exists():
            partial.chmod(stat.S_IMODE(whole.stat().st_mode))
        yield partial
        _sync(partial)  # else a power cut may leave the new name with no content
        partial.replace(whole)
        sync_folder(whole.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _remove_left_behind(partial: Path, stem: str) -> None:
    """Remove partial files of killed processes; `partial`, which is new, shows the time on that file system."""
    began_s = partial.stat().st_mtime
    for old in partial.parent.glob(f"{glob.escape(stem)}.{'[0-9a-f]' * 8}.partial*"):
        with contextlib.suppress(OSError):
            if began_s - old.lstat().st_mtime > LEFT_BEHIND_S:
                old.unlink()


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk; file systems that refuse this do it by themselves."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EACCES, errno.EPERM):
            raise


@contextlib.contextmanager
def users_file(path: Path) -> Iterator[Path]:
    """Like `atomic_write`, for a file that the user has named: raises `UserError` if it cannot be written."""
    try:
        with atomic_write(path) as partial:
            yield partial
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}", "choose another path") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
