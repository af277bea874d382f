"""Where things are by default: the daemon's endpoint, the store's file, the user's own fabrics.

`ZEROTUNE_ENDPOINT`, `ZEROTUNE_RUNTIME_DIR` and `ZEROTUNE_STORE` override them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

APP_NAME = "zerotune"


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


def default_store_path() -> Path:
    """The store's file, below the XDG data directory."""
    override = os.environ.get("ZEROTUNE_STORE")
    if override:
        return Path(override)
    return _data_dir() / "store.db"


def user_fabrics_dir() -> Path:
    """The folder of the fabrics that this user has added, below the XDG data directory; not created here."""
    return _data_dir() / "fabrics"


def _data_dir() -> Path:
    return Path(platformdirs.user_data_dir(APP_NAME, appauthor=False))
