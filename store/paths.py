"""Default paths of the daemon's endpoint, the store and the user's fabrics; and which endpoints are valid.

`ZEROTUNE_ENDPOINT`, `ZEROTUNE_RUNTIME_DIR` and `ZEROTUNE_STORE` override them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Final, Literal

import platformdirs

from .errors import UserError
from .foreign.ways import SESSION_DIRS

APP_NAME = "zerotune"
MAX_IPC_PATH_BYTES: Final = 107
"""Longest path of a Unix domain socket on Linux."""
MAX_SOCKET_NAME_BYTES: Final = MAX_IPC_PATH_BYTES - len("/proc/self/fd/1048576/")
"""Longest name of a socket: clients reach it through the folder that they have opened and checked."""
MAX_PORT: Final = 65_535
_TCP_REMEDY: Final = "write tcp://HOST:PORT"
ENDPOINT_REMEDY: Final = "give another with --endpoint or ZEROTUNE_ENDPOINT"
PLACE_REMEDY: Final = "give another with ZEROTUNE_RUNTIME_DIR, --endpoint or ZEROTUNE_ENDPOINT"
_SOCKET = "daemon.sock"
MAX_HOST_BYTES = 32
"""Bytes of a host's name in a path, since a socket's whole path has 107 bytes at most."""
SERVICE_RUNTIME_DIR = "/run/zerotune"
"""Root's `zerotune daemon --all-users` makes a folder here for each user's socket, named by the user's number."""
SERVICE_DOOR = "door.sock"
"""The socket in SERVICE_RUNTIME_DIR at which users ask for their daemon."""
SERVICE_STATE_DIR = "/var/lib/zerotune"
"""Root's daemon makes a folder here for each user's store, named by the user's number."""


def runtime_dir() -> Path:
    """The directory of sockets and locks; this neither makes nor checks it (`open_socket_folder` checks it).

    If no directory is suitable, this names one below /run/user that only root can make.
    """
    override = os.environ.get("ZEROTUNE_RUNTIME_DIR")
    if override:
        return Path(override)
    if is_private(of_service := Path(SERVICE_RUNTIME_DIR) / str(os.getuid())):
        return of_service
    # The XDG specification refuses a directory that is another user's (as after `su`) or open to others.
    for session_dir in (os.environ.get("XDG_RUNTIME_DIR"), f"{SESSION_DIRS}/{os.getuid()}"):
        if session_dir and is_private(Path(session_dir)) and _fits(Path(session_dir) / APP_NAME):
            return Path(session_dir) / APP_NAME
    # Containers and batch jobs have no login session. Nodes may share a home.
    with contextlib.suppress(UserError):  # without a home
        if _is_out_of_reach(of_node := state_dir() / "run" / _host()) and _fits(of_node):
            return of_node
    return Path(SESSION_DIRS) / str(os.getuid()) / APP_NAME


def default_endpoint() -> str:
    """The daemon's ZeroMQ endpoint on this node."""
    return os.environ.get("ZEROTUNE_ENDPOINT") or f"ipc://{runtime_dir() / _SOCKET}"


def default_store_path() -> Path:
    """The store's file: in the folder of the node's service if this user has one, else below the XDG data directory.

    Raises:
        UserError: this user has no home.
    """
    override = os.environ.get("ZEROTUNE_STORE")
    if override:
        return Path(override)
    return (_of_service() or _data_dir()) / "store.db"


def user_fabrics_dir() -> Path:
    """The folder of the fabrics that this user has added, below the XDG data directory; this does not create it.

    Raises:
        UserError: this user has no home.
    """
    return _data_dir() / "fabrics"


def state_dir() -> Path:
    """The folder of what this user's programs must not forget; this does not create it.

    It is the folder of the node's service if this user has one, since the service's daemons see no homes. Otherwise
    it is below the XDG state directory.

    Raises:
        UserError: this user has no home.
    """
    return _of_service() or _at_home(platformdirs.user_state_dir)


def is_private(folder: Path) -> bool:
    """Whether a folder is there, is this user's, and is closed to all others."""
    try:
        found = folder.stat()
    except OSError:
        return False
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return folder.is_absolute() and is_own and not stat.S_IMODE(found.st_mode) & 0o077


def _fits(folder: Path) -> bool:
    """Whether ZeroMQ accepts a socket's path in that folder."""
    path = str(folder / _SOCKET)
    return len(os.fsencode(path)) <= MAX_IPC_PATH_BYTES and is_utf8(path)


def is_utf8(path: str) -> bool:
    """Whether ZeroMQ accepts the path."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_out_of_reach(folder: Path) -> bool:
    """Whether the nearest existing folder is this user's, and others cannot replace what is made in it."""
    nearest = None
    for above in folder.parents if folder.is_absolute() else ():  # it is not where there is no home
        try:
            found = above.stat()
        except FileNotFoundError:
            continue
        except OSError:
            return False
        nearest = nearest or found
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            return False
    if nearest is None:
        return False
    return stat.S_ISDIR(nearest.st_mode) and nearest.st_uid == os.getuid() and not nearest.st_mode & stat.S_IWOTH


def _host() -> str:
    name = socket.gethostname()
    if re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_HOST_BYTES - 1}}}", name):
        return name
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
    return re.sub("[^A-Za-z0-9_-]", "_", name)[: MAX_HOST_BYTES - len(digest) - 1] + f"-{digest}"


def _of_service() -> Path | None:
    """The folder that the node's service has made for this user's files."""
    return of_service if is_private(of_service := Path(SERVICE_STATE_DIR) / str(os.getuid())) else None


def _data_dir() -> Path:
    return _at_home(platformdirs.user_data_dir)


def _at_home(find: Callable[[str, Literal[False]], str]) -> Path:
    try:
        return Path(find(APP_NAME, False))
    except RuntimeError as error:
        raise UserError(f"user {os.getuid()} has no home, and HOME is not set", "set HOME to a folder") from error


def check_endpoint(endpoint: str) -> None:
    """Refuse an endpoint at which no daemon can listen.

    Raises:
        UserError: it is no ipc:// or tcp:// address, it is not UTF-8, its socket's path is missing or too long, or its
            port is impossible.
    """
    scheme, _, place = endpoint.partition("://")
    if not is_utf8(endpoint):
        raise UserError(f"endpoint {endpoint!r} is no UTF-8", PLACE_REMEDY)
    if scheme not in ("ipc", "tcp") or not place:
        raise UserError(f"endpoint {endpoint!r} is neither ipc:// nor tcp://", ENDPOINT_REMEDY)
    if scheme == "ipc" and len(os.fsencode(place)) > MAX_IPC_PATH_BYTES:
        raise UserError(
            f"socket path {place} is longer than {MAX_IPC_PATH_BYTES} bytes",
            PLACE_REMEDY,
        )
    port = place.rpartition(":")[2]
    if scheme == "ipc" and len(os.fsencode(PurePath(place).name)) > MAX_SOCKET_NAME_BYTES:
        raise UserError(f"socket name {place} is longer than {MAX_SOCKET_NAME_BYTES} bytes", ENDPOINT_REMEDY)
    if scheme == "ipc" and place.startswith("@"):
        raise UserError(f"endpoint {endpoint} is an abstract socket, which anyone may connect to", ENDPOINT_REMEDY)
    if scheme == "tcp" and not (port == "*" or (port.isascii() and port.isdigit() and int(port) <= MAX_PORT)):
        raise UserError(f"endpoint {endpoint} has no possible port: {port!r} is none of 0 to {MAX_PORT}", _TCP_REMEDY)
