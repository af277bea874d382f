"""Checks whether other users could have put something at a path, before its content is executed or trusted.

For messages, `what` names the purpose of a file or folder, and `elsewhere` another path, which the remedy proposes.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path
from typing import Final

from ..errors import UntrustedError

SESSION_DIRS = "/run/user"
"""systemd makes each user's runtime directory here; cron and batch jobs do not get its path."""
_MOST_LINKS: Final = 40
"""The kernel follows this many in one path."""


def refuse_reachable(path: Path, what: str, elsewhere: str) -> None:
    """Refuse an absolute path if users other than this one and root could have put something there, or still could.

    This checks every folder and link of the path, and the file itself. Missing parts are skipped.

    Raises:
        UntrustedError: another user could.
        OSError: a folder on the way cannot be looked at.
    """
    at, pending, n_links = Path("/"), list(reversed(path.parts[1:])), 0
    _refuse(at, os.lstat(at), what, elsewhere)
    while pending:
        name = pending.pop()
        at = at.parent if name == ".." else at / name
        try:
            found = os.lstat(at)
        except FileNotFoundError:
            return
        _refuse(at, found, what, elsewhere)
        if stat.S_ISLNK(found.st_mode):
            if (n_links := n_links + 1) > _MOST_LINKS:
                raise UntrustedError(f"the way to {what} {path} has too many links", elsewhere)
            target = Path(os.readlink(at))
            at = Path("/") if target.is_absolute() else at.parent
            pending += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def make_own_folder(folder: Path, what: str, elsewhere: str) -> None:
    """Make a folder, and missing ones above it, that only this user can write to or replace.

    Raises:
        UntrustedError: others could put something there.
    """
    refuse_reachable(folder, what, elsewhere)
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)
    refuse_reachable(folder, what, elsewhere)


def _refuse(at: Path, found: os.stat_result, what: str, elsewhere: str) -> None:
    if found.st_uid not in (os.getuid(), 0):
        raise UntrustedError(f"{what} is not used: {at} belongs to user {found.st_uid}", elsewhere)
    if stat.S_ISLNK(found.st_mode):
        return  # its mode means nothing
    is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_open and not (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX):
        remedy = (
            elsewhere if found.st_uid != os.getuid() else f"run `chmod go-w {shlex.quote(str(at))}`, or {elsewhere}"
        )
        raise UntrustedError(f"{what} is not used: others may write to {at}", remedy)
