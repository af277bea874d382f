"""A lock that names its holder and that no dead process can hold.

The kernel's flock decides who holds it, so kill -9 frees it at once; the file's text only names the holder.
Libraries for lock files do not name the holder, so we have our own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
from pathlib import Path
from typing import Final

import msgspec

from .errors import UntrustedError, printable
from .records import Ordinal

_AS_IT_IS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Opens whatever is at the path, without following a link or waiting for a pipe."""


class _Holder(msgspec.Struct):
    pid: Ordinal
    command: str


class LockHeld(Exception):
    """Another process holds the lock; `pid` is 0 while that process has not written its name yet."""

    def __init__(self, path: Path, pid: int, command: str) -> None:
        super().__init__(f"{path} is held by {command} (pid {pid})")
        self.pid = pid
        self.command = command


class LockFile:
    """An exclusive lock on `path`, held from construction to `release`.

    Raises:
        LockHeld: another process (or another LockFile of this one) holds it.
        UntrustedError: the path is a link or no regular file; locking it would overwrite another file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = _acquire(path)
        holder = _Holder(os.getpid(), _command())
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, msgspec.json.encode(holder), 0)
        except OSError:  # a full disk, say
            self.release()
            raise

    def release(self) -> None:
        """Release the lock and remove its file; may be called twice."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # the lock is free even if the file stays
                self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def named_holder(path: Path) -> tuple[int, str] | None:
    """Pid and command that the file names, even if that process has ended; None if it names nobody.

    This does not take the lock, so another process can take it meanwhile.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _AS_IT_IS)
        try:
            held = _held(path, os.read(descriptor, 4096))
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return (held.pid, held.command) if held.pid > 0 else None


def _acquire(path: Path) -> int:
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0)
            os.close(descriptor)
            raise _held(path, holder) from None
        except OSError:
            os.close(descriptor)
            raise
        # The previous holder may have removed the file between our open and our flock.
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _AS_IT_IS, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    else:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:  # 0 links: its holder has just removed it
            return descriptor
        os.close(descriptor)
    raise UntrustedError(f"lock file {path} is a link, or no file", "find out who made it, and remove it")


def _held(path: Path, text: bytes) -> LockHeld:
    try:
        holder = msgspec.json.decode(text, type=_Holder)
        return LockHeld(path, holder.pid, holder.command)
    except (ValueError, RecursionError):
        return LockHeld(path, 0, "another process")


def _command() -> str:
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return printable(" ".join([name, *sys.argv[1:]])[:200])  # paths may hold bytes that are no text
