"""Where things are by default, and what an endpoint must look like: the daemon's, the store's file, own fabrics.

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
"""Clients reach it through the folder that they have opened and checked."""
MAX_PORT: Final = 65_535
_TCP_REMEDY: Final = "write tcp://HOST:PORT"
ENDPOINT_REMEDY: Final = "give another with --endpoint or ZEROTUNE_ENDPOINT"
_SOCKET = "daemon.sock"
MAX_HOST_BYTES = 32
"""Of a host's name in a path: those of sockets are short, and end in 107 bytes."""
SERVICE_RUNTIME_DIR = "/run/zerotune"
"""Where root's `zerotune daemon --all-users` makes a folder for the socket of each user, named by their number."""
SERVICE_DOOR = "door.sock"
"""The socket in it where users ask for their daemon."""
SERVICE_STATE_DIR = "/var/lib/zerotune"
"""Where it makes a folder for the store of each user, named likewise."""


def runtime_dir() -> Path:
    """The directory of sockets and locks; neither made nor checked here (`open_socket_folder` checks it).

    Where nothing fits, it is one below /run/user that only root can make.
    """
    override = os.environ.get("ZEROTUNE_RUNTIME_DIR")
    if override:
        return Path(override)
    if is_private(of_service := Path(SERVICE_RUNTIME_DIR) / str(os.getuid())):
        return of_service
    # Of another user, say after `su`, or open to others, it is no runtime directory by the XDG specification.
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
    """The store's file: the one of the node's service if this user has one, else below the XDG data directory.

    Raises:
        UserError: this user has no home.
    """
    override = os.environ.get("ZEROTUNE_STORE")
    if override:
        return Path(override)
    return (_of_service() or _data_dir()) / "store.db"


def user_fabrics_dir() -> Path:
    """The folder of the fabrics that this user has added, below the XDG data directory; not created here.

    Raises:
        UserError: this user has no home.
    """
    return _data_dir() / "fabrics"


def state_dir() -> Path:
    """The folder of what this user's programs must not forget; not created here.

    It is that of the node's service if this user has one, since the service's daemons see no homes, else it is below
    the XDG state directory.

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
    """Whether a socket can have its name there: nobody is to blame for a name who did not choose it."""
    path = str(folder / _SOCKET)
    return len(os.fsencode(path)) <= MAX_IPC_PATH_BYTES and _is_utf8(path)


def _is_utf8(path: str) -> bool:
    """Whether ZeroMQ takes it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_out_of_reach(folder: Path) -> bool:
    """Whether what is made there is made in a folder of this user's, and others can put nothing in its place."""
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
    """The folder that the node's service has made for what this user keeps."""
    return of_service if is_private(of_service := Path(SERVICE_STATE_DIR) / str(os.getuid())) else None


def _data_dir() -> Path:
    return _at_home(platformdirs.user_data_dir)


def _at_home(find: Callable[[str, Literal[False]], str]) -> Path:
    try:
        return Path(find(APP_NAME, False))
    except RuntimeError as error:
        raise UserError(f"user {os.getuid()} has no home, and HOME is not set", "set HOME to a folder") from error


def check_endpoint(endpoint: str) -> None:
    """See that a daemon could ever be at `endpoint`.

    Raises:
        UserError: it is no ipc:// or tcp:// address, is no UTF-8, its socket has a path that is too long or none at
            all, or there is no such port.
    """
    scheme, _, place = endpoint.partition("://")
    if not _is_utf8(endpoint):
        raise UserError(f"endpoint {endpoint!r} is no UTF-8", ENDPOINT_REMEDY)
    if scheme not in ("ipc", "tcp") or not place:
        raise UserError(f"endpoint {endpoint!r} is neither ipc:// nor tcp://", ENDPOINT_REMEDY)
    if scheme == "ipc" and len(os.fsencode(place)) > MAX_IPC_PATH_BYTES:
        raise UserError(
            f"socket path {place} is longer than {MAX_IPC_PATH_BYTES} bytes",
            "give another with ZEROTUNE_RUNTIME_DIR, --endpoint or ZEROTUNE_ENDPOINT",
        )
    port = place.rpartition(":")[2]
    if scheme == "ipc" and len(os.fsencode(PurePath(place).name)) > MAX_SOCKET_NAME_BYTES:
        raise UserError(f"socket name {place} is longer than {MAX_SOCKET_NAME_BYTES} bytes", ENDPOINT_REMEDY)
    if scheme == "ipc" and place.startswith("@"):
        raise UserError(f"endpoint {endpoint} is an abstract socket, which anyone may connect to", ENDPOINT_REMEDY)
    if scheme == "tcp" and not (port == "*" or (port.isascii() and port.isdigit() and int(port) <= MAX_PORT)):
        raise UserError(f"endpoint {endpoint} has no possible port: {port!r} is none of 0 to {MAX_PORT}", _TCP_REMEDY)
