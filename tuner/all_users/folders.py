"""Users' folders: root makes them inside root's own folders, so that no user can replace another's."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from ...store.errors import UserError
from ...store.foreign.regular_file import read_file

POOLS: Final = "shared"
"""Folder for shared knowledge below the state folder."""
MAX_LIST_BYTES: Final = 16 * 2**20
"""Longest list of subordinate uids."""


class Share(Enum):
    """With whom a user's daemon shares its measurements."""

    private = "private"
    group = "group"
    node = "node"


class User(NamedTuple):
    """The user that a daemon runs as."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    has_name: bool
    """Whether the node's list of users has this one."""

    @classmethod
    def of(cls, uid: int, gid: int) -> User:
        """The user with a uid; `gid` is the group of a user who is not in the node's list of users."""
        try:
            known = pwd.getpwuid(uid)
        except KeyError:
            return cls(uid, gid, (), False)
        return cls(uid, known.pw_gid, tuple(os.getgrouplist(known.pw_name, known.pw_gid)), True)


class Folders(NamedTuple):
    """The folders of a user's socket, store and shared knowledge."""

    runtime: Path
    state: Path
    pool: Path | None

    @property
    def log(self) -> Path:
        """The daemon's log of its last start; only the user writes to it."""
        return self.state / "daemon.log"

    @property
    def endpoint(self) -> str:
        """The address of the user's daemon."""
        return f"ipc://{self.runtime / 'daemon.sock'}"


def make_for(user: User, runtime: Path, state: Path, share: Share) -> Folders:
    """Make a user's missing folders below the service's folders for sockets (`runtime`) and for stores (`state`).

    Raises:
        UserError: a folder exists that is not this user's.
    """
    own = str(user.uid)
    made = Folders(runtime / own, state / own, _pool(user, state, share))
    for folder in (made.runtime, made.state):
        _make(folder, user.uid, user.gid, 0o700)
    if made.pool is not None:
        _make(made.pool / own, user.uid, user.gid, 0o755)
    return made


def make_roots(runtime: Path, state: Path) -> None:
    """Make the service's own folders, which root owns and all users may enter.

    Raises UserError if a folder cannot be made, or is another user's.
    """
    for folder in (runtime, state, state / POOLS):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _make(folder, os.getuid(), os.getgid(), 0o755)
        except OSError as error:
            raise UserError(f"folder {folder} cannot be made: {error.strerror}", "run this as root") from error


def refuse_lent(uid: int, path: Path = Path("/etc/subuid")) -> None:
    """Refuse, with a UserError, a subordinate uid of a user's containers.

    Otherwise thousands of these would count as users.
    """
    try:
        lines = read_file(path, MAX_LIST_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        name, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if first.isdecimal() and count.isdecimal() and int(first) <= uid < int(first) + int(count):
            raise UserError(f"user {uid} is a number lent to {name!r}", "ask as that user, outside of the container")


def group_id(name: str) -> int:
    """The gid of a group; UserError if there is none."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise UserError(f"there is no group {name!r}", "make it with `groupadd`, or name another") from error


def _pool(user: User, state: Path, share: Share) -> Path | None:
    if share is Share.private:
        return None
    if share is Share.node:
        _make(pool := state / POOLS / "node", os.getuid(), os.getgid(), 0o755)
    else:
        _make(pool := state / POOLS / f"group-{user.gid}", os.getuid(), user.gid, 0o750)
    return pool


def _make(folder: Path, uid: int, gid: int, mode: int) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == uid != os.getuid():
            return
        # Only root makes folders here: an earlier service died before the next two lines.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise UserError(f"{folder} is not a folder of user {uid}", "find out who made it, and remove it") from None
    folder.chmod(mode)  # before it gets another owner: then the service needs no right to change others' folders
    os.chown(folder, uid, gid)
