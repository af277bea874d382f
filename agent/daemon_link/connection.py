"""A connection to a daemon, whose identity is checked before the first byte is sent.

A daemon's plans decide how fast training is, and messages to it describe the job. So a client identifies a daemon at
`tcp://` by its key. At `ipc://` it checks that only this user and root may write to the socket's folder, and which user
listens there.
"""

from __future__ import annotations

import os
import shlex
import socket as sockets
import stat
from pathlib import Path
from typing import Any

import zmq

from ...store.errors import UntrustedError
from ...store.foreign.peer import Peer, peer_of
from ...store.paths import ENDPOINT_REMEDY
from ...store.private_folders import open_socket_folder
from .keys import keys_dir, use_client_keys
from .least_free import refuse_few_files, refuse_few_threads


def new_context() -> zmq.Context[Any]:
    """A ZeroMQ context; raises `UserError` if too few descriptors or threads are free for it."""
    refuse_few_files()
    refuse_few_threads()
    return zmq.Context()


class Connection:
    """Connects one socket to the daemon at an endpoint.

    The folder of an `ipc://` socket is kept open, and the socket's path goes through its descriptor. So when ZeroMQ
    reconnects, it uses the folder that was checked, even if another folder has replaced it.

    Args:
        curve_dir: folder with the keys for `tcp://`; None: `keys_dir()`.
    """

    def __init__(self, endpoint: str, curve_dir: Path | None = None) -> None:
        scheme, _, place = endpoint.partition("://")
        self._endpoint = endpoint
        self._curve_dir = curve_dir
        self._path = Path(place) if scheme == "ipc" else None
        self._folder = -1
        self._is_connected = False

    def connect(self, socket: zmq.Socket[Any]) -> bool:
        """Connect, unless connected already; False: there is no daemon. Call it now and then: a daemon may start later.

        Raises:
            UntrustedError: another user's daemon listens there, or could.
            UserError: the endpoint needs keys, and they cannot be read.
        """
        if self._path is not None:
            return self._connect_ipc(socket, self._path)
        if not self._is_connected:
            use_client_keys(socket, self._curve_dir or keys_dir())
            socket.connect(self._endpoint)
            self._is_connected = True
        return True

    def close(self) -> None:
        """Close the folder; to be called after the socket's context has ended, which may reconnect until then."""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _connect_ipc(self, socket: zmq.Socket[Any], path: Path) -> bool:
        try:
            folder = open_socket_folder(path.parent)
        except OSError:
            return False
        try:
            if self._folder >= 0 and os.path.samestat(os.fstat(folder), os.fstat(self._folder)):
                return True
            if not _is_served(f"/proc/self/fd/{folder}/{path.name}", path):
                return False
            if self._folder >= 0:  # a new folder has replaced it: ZeroMQ reconnects through the same descriptor
                os.dup2(folder, self._folder, inheritable=False)
                return True
            self._folder, folder = folder, -1
        finally:
            if folder >= 0:
                os.close(folder)
        socket.connect(f"ipc:///proc/self/fd/{self._folder}/{path.name}")
        return True


def listener_pid(endpoint: str) -> int | None:
    """The process that listens at an `ipc://` endpoint; 0: one of another container; None: none, or it is `tcp://`."""
    scheme, _, place = endpoint.partition("://")
    try:
        return _listener(place).pid if scheme == "ipc" else None
    except OSError:
        return None


def _listener(path: str) -> Peer:
    """The process that listens at a socket."""
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.setblocking(False)  # a stopped daemon does not accept connections
        probe.connect(path)
        return peer_of(probe)


def _is_served(reached: str, path: Path) -> bool:
    """Whether this user or root listens at a socket; False if no process does.

    Raises:
        UntrustedError: another user listens there, has made the socket, or may write to it.
    """
    try:
        user = _listener(reached).uid
        found = os.stat(reached)
    except OSError:
        return False
    trusted = (os.getuid(), 0)
    if user not in trusted or found.st_uid not in trusted:
        stranger = user if user not in trusted else found.st_uid
        raise UntrustedError(f"the daemon at ipc://{path} is that of user {stranger}", ENDPOINT_REMEDY)
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        remedy = f"run `chmod 600 {shlex.quote(str(path))}`"
        raise UntrustedError(f"socket {path} is open to other users (mode {mode:04o})", remedy)
    return True
