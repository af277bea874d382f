"""Where things are by default: the daemon's endpoint and the store's file.

`ZEROTUNE_ENDPOINT`, `ZEROTUNE_RUNTIME_DIR` and `ZEROTUNE_STORE` override them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

from store.errors import UserError

APP_NAME = "zerotune"
MAX_IPC_PATH_BYTES = 107
"""Longest path of a Unix domain socket on Linux."""
ENDPOINT_REMEDY = "give another with --endpoint or ZEROTUNE_ENDPOINT"


def runtime_dir() -> Path:
    """The directory of sockets and locks; not created here (the daemon does, with mode 0700)."""
    override = os.environ.get("ZEROTUNE_RUNTIME_DIR")
    if override:
        return Path(override)
    session_dir = os.environ.get("XDG_RUNTIME_DIR")
    if session_dir:
        return Path(session_dir) / APP_NAME
    # Containers and batch jobs have no login session. The daemon makes it private and checks the owner.
    return Path(tempfile.gettempdir()) / f"{APP_NAME}-{os.getuid()}"


def default_endpoint() -> str:
    """The daemon's ZeroMQ endpoint on this node."""
    return os.environ.get("ZEROTUNE_ENDPOINT") or f"ipc://{runtime_dir() / 'daemon.sock'}"


def check_endpoint(endpoint: str) -> None:
    """See that a daemon could ever be at `endpoint`.

    Raises:
        UserError: it is no ipc:// or tcp:// address, or its socket's path is too long.
    """
    scheme, _, place = endpoint.partition("://")
    if scheme not in ("ipc", "tcp") or not place:
        raise UserError(f"endpoint {endpoint!r} is neither ipc:// nor tcp://", ENDPOINT_REMEDY)
    if scheme == "ipc" and len(os.fsencode(place)) > MAX_IPC_PATH_BYTES:
        raise UserError(f"socket path {place} is longer than {MAX_IPC_PATH_BYTES} bytes", ENDPOINT_REMEDY)


def default_store_path() -> Path:
    """The store's file, below the XDG data directory."""
    override = os.environ.get("ZEROTUNE_STORE")
    if override:
        return Path(override)
    return Path(platformdirs.user_data_dir(APP_NAME, appauthor=False)) / "store.db"
