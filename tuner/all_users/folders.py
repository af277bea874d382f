"""The folders of users: made by root inside folders of root's, so that no user can put another's in their place."""

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
"""Below the state folder: what users know in common."""
MAX_LIST_BYTES: Final = 16 * 2**20
"""Of the list of lent numbers."""


class Share(Enum):
    """With whom a user's daemon shares what it has measured."""

    private = "private"
    group = "group"
    node = "node"


class User(NamedTuple):
    """Whom a daemon runs as."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    has_name: bool
    """Whether the node's list of users has them."""

    @classmethod
    def of(cls, uid: int, gid: int) -> User:
        """The user with a number; `gid` is the group of one whom the node's list of users does not have."""
        try:
            known = pwd.getpwuid(uid)
        except KeyError:
            return cls(uid, gid, (), False)
        return cls(uid, known.pw_gid, tuple(os.getgrouplist(known.pw_name, known.pw_gid)), True)


class Folders(NamedTuple):
    """Where a user's socket, store and shared knowledge are."""

    runtime: Path
    state: Path
    pool: Path | None

    @property
    def log(self) -> Path:
        """What the user's daemon says, of its last start; only the user writes to it."""
        return self.state / "daemon.log"

    @property
    def endpoint(self) -> str:
        """The address of the user's daemon."""
        return f"ipc://{self.runtime / 'daemon.sock'}"


def make_for(user: User, runtime: Path, state: Path, share: Share) -> Folders:
    """Make what is missing of a user's folders.

    Args:
        runtime: the service's folder for sockets.
        state: the service's folder for stores.
        share: with whom the user shares knowledge.

    Raises:
        UserError: one is there that is not this user's.
        OSError: one cannot be made.
    """
    own = str(user.uid)
    made = Folders(runtime / own, state / own, _pool(user, state, share))
    for folder in (made.runtime, made.state):
        _make(folder, user.uid, user.gid, 0o700)
    if made.pool is not None:
        _make(made.pool / own, user.uid, user.gid, 0o755)
    return made


def make_roots(runtime: Path, state: Path) -> None:
    """Make the service's own folders, which are root's and which all may enter.

    Raises:
        UserError: one cannot be made, or is another's.
    """
    for folder in (runtime, state, state / POOLS):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _make(folder, os.getuid(), os.getgid(), 0o755)
        except OSError as error:
            raise UserError(f"folder {folder} cannot be made: {error.strerror}", "run this as root") from error


def refuse_lent(uid: int, path: Path = Path("/etc/subuid")) -> None:
    """Refuse a number that is lent to a user, for their containers: each of thousands would be a user otherwise.

    Raises:
        UserError: it is lent.
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
    """The number of a group.

    Raises:
        UserError: there is no such group.
    """
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
        # Nobody but root puts anything beside it: it is a service's that died before the next two lines.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise UserError(f"{folder} is not a folder of user {uid}", "find out who made it, and remove it") from None
    folder.chmod(mode)  # before it is another's: the service needs no right to change those
    os.chown(folder, uid, gid)
