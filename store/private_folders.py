"""Folders of this user alone: made private whatever the umask is, and checked before use.

For messages, `what` names a file's purpose, and `elsewhere` another path, which the remedy proposes.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from pathlib import Path

from .errors import StoreError, UntrustedError
from .paths import runtime_dir


def make_private(folder: Path) -> None:
    """Make `folder` and those above it that are missing, each for this user alone."""
    if not folder.is_dir():
        make_private(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)


def refuse_open_folder(path: Path, what: str, elsewhere: str) -> None:
    """Refuse a file's path if any user can put files beside it, or if its folder is another user's.

    The file may be missing.

    Raises:
        StoreError: it is refused.
        OSError: there is no such folder.
    """
    folder = path.parent.stat()
    if folder.st_uid not in (os.getuid(), 0):
        problem = f"the folder of {what} {path} belongs to user {folder.st_uid}"
        raise StoreError(problem, f"be that user, or {elsewhere}")
    if folder.st_mode & stat.S_IWOTH:
        is_for_all = folder.st_mode & stat.S_ISVTX or folder.st_uid != os.getuid()  # as /tmp: it must stay as it is
        remedy = elsewhere if is_for_all else f"run `chmod o-w {shlex.quote(str(path.parent))}`, or {elsewhere}"
        raise StoreError(f"any user may put files beside {what} {path}", remedy)


def open_socket_folder(folder: Path) -> int:
    """A descriptor of a folder in which only this user and root can put a socket or a lock.

    The runtime directory must be this user's and closed to all others, and may be no link. The descriptor stays valid
    whatever the path names later.

    Raises:
        UntrustedError: other users could put a socket or a lock there.
        OSError: there is no such folder.
    """
    is_own = folder == runtime_dir()
    if is_own and folder.is_symlink():
        raise UntrustedError(f"socket directory {folder} is a link", "name its target with ZEROTUNE_RUNTIME_DIR")
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if is_own else 0))
    found = os.fstat(descriptor)
    mode = stat.S_IMODE(found.st_mode)
    try:
        if found.st_uid != os.getuid() and (is_own or found.st_uid != 0):
            raise UntrustedError(
                f"socket directory {folder} belongs to user {found.st_uid}",
                "name another with ZEROTUNE_RUNTIME_DIR, --endpoint or ZEROTUNE_ENDPOINT",
            )
        if mode & (0o077 if is_own else 0o022):
            named = "name another with --endpoint or ZEROTUNE_ENDPOINT"
            is_for_all = mode & stat.S_ISVTX or found.st_uid != os.getuid()  # as /tmp: it must stay as it is
            raise UntrustedError(
                f"socket directory {folder} is open to other users (mode {mode:04o})",
                named if is_for_all else f"run `chmod 700 {shlex.quote(str(folder))}`, or {named}",
            )
    except UntrustedError:
        os.close(descriptor)
        raise
    return descriptor
