"""The client's side of an encrypted connection to a daemon at `tcp://`.

Keys are ZeroMQ certificates in one folder, see `zerotune.tuner.service.endpoint`; `zerotune daemon keys` makes them.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path
from typing import Any, Final

import zmq
import zmq.auth

from ...store.errors import UserError, reason
from ...store.foreign.regular_file import read_file
from ..settings import ENV_CURVE_KEYS

MAX_KEY_BYTES: Final = 65_536


def keys_dir() -> Path | None:
    """The folder that `ZEROTUNE_CURVE_KEYS` names."""
    value = os.environ.get(ENV_CURVE_KEYS)
    return Path(value) if value else None


def use_client_keys(socket: zmq.Socket[Any], folder: Path | None) -> None:
    """Make `socket` a CURVE client of the daemon whose public key is in `folder`.

    Raises:
        UserError: there is no folder, or other users may write to it; or a key is missing, malformed, or readable by
            other users.
    """
    if folder is None:
        raise UserError("a daemon at tcp:// wants keys", f"give --curve-keys or {ENV_CURVE_KEYS}")
    refuse_writable(folder)
    public_key, secret_key = load_key_pair(folder / "client.key_secret")
    try:
        server_key, _ = load_certificate(folder / "server.key")
    except (OSError, ValueError) as error:
        problem = f"key {folder / 'server.key'} cannot be read: {reason(error)}"
        raise UserError(problem, "copy it from the daemon") from error
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = public_key, secret_key, server_key


def load_certificate(path: Path) -> tuple[bytes, bytes | None]:
    """Public key, and secret key if the file has it.

    Raises:
        OSError: `path` is no regular file of at most MAX_KEY_BYTES.
        ValueError: it holds no key.
    """
    read_file(path, MAX_KEY_BYTES)
    return zmq.auth.load_certificate(path)


def refuse_writable(folder: Path) -> None:
    """Raise `UserError` if another user may put keys into `folder`; a missing folder passes."""
    if folder.is_dir() and folder.stat().st_mode & 0o022:
        raise UserError(f"others may put keys into {folder}", f"run `chmod go-w {shlex.quote(str(folder))}`")


def load_key_pair(path: Path) -> tuple[bytes, bytes]:
    """Public and secret key in `path`; raises `UserError` if they cannot be read, or other users can read them."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            remedy = f"run `chmod 600 {shlex.quote(str(path))}`; better, make new keys"
            raise UserError(f"key {path} can be read by others", remedy)
        public_key, secret_key = load_certificate(path)
    except (OSError, ValueError) as error:
        problem = f"key {path} cannot be read: {reason(error)}"
        raise UserError(problem, "make keys with `zerotune daemon keys`") from error
    if secret_key is None:
        raise UserError(f"key {path} has no secret half", "make keys with `zerotune daemon keys`")
    return public_key, secret_key
