"""The way to a daemon, which is checked before the first byte.

A daemon's plans decide how fast training is, and what is sent to it tells about the job. So a client makes sure of the
daemon at `tcp://` by its key, and at `ipc://` by the folder of its socket, where only this user and root may put one,
and by the user who listens there.
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
    """ZeroMQ's threads, begun only where there is room for them.

    Raises:
        UserError: there are not enough free descriptors or threads.
    """
    refuse_few_files()
    refuse_few_threads()
    return zmq.Context()


class Line:
    """Connects one socket to the daemon at an endpoint.

    The folder of an `ipc://` socket is held open and the socket is reached through it: when ZeroMQ connects again,
    it does so in the folder that was checked, whatever has come to stand in its place.

    Args:
        endpoint: the daemon's, `ipc://…` or `tcp://…`.
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
        """Connect, unless that has been done; to be called now and then while no daemon may be there yet.

        Returns:
            False: there is no daemon.

        Raises:
            UntrustedError: another user's is there, or could be.
            UserError: the endpoint needs keys, and none can be read.
        """
        if self._path is not None:
            return self._connect_ipc(socket, self._path)
        if not self._is_connected:
            use_client_keys(socket, self._curve_dir or keys_dir())
            socket.connect(self._endpoint)
            self._is_connected = True
        return True

    def close(self) -> None:
        """Call after the socket's context has ended, which may connect again until then."""
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
            if self._folder >= 0:  # made anew since: ZeroMQ goes on under the same name
                os.dup2(folder, self._folder, inheritable=False)
                return True
            self._folder, folder = folder, -1
        finally:
            if folder >= 0:
                os.close(folder)
        socket.connect(f"ipc:///proc/self/fd/{self._folder}/{path.name}")
        return True


def listener_pid(endpoint: str) -> int | None:
    """Which process listens at an `ipc://` endpoint, 0 for one of another container; None: nobody, or it is `tcp://`."""
    scheme, _, place = endpoint.partition("://")
    try:
        return _listener(place).pid if scheme == "ipc" else None
    except OSError:
        return None


def _listener(path: str) -> Peer:
    """The process that listens at a socket."""
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.setblocking(False)  # a daemon that stands still lets connections wait
        probe.connect(path)
        return peer_of(probe)


def _is_served(reached: str, path: Path) -> bool:
    """Whether this user or root listens at a socket; False where nobody does.

    Raises:
        UntrustedError: another user does, or has made the socket, or may speak for us there.
    """
    try:
        user = _listener(reached).uid
        found = os.stat(reached)
    except OSError:
        return False
    ours = (os.getuid(), 0)
    if user not in ours or found.st_uid not in ours:
        stranger = user if user not in ours else found.st_uid
        raise UntrustedError(f"the daemon at ipc://{path} is that of user {stranger}", ENDPOINT_REMEDY)
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        remedy = f"run `chmod 600 {shlex.quote(str(path))}`"
        raise UntrustedError(f"socket {path} is open to other users (mode {mode:04o})", remedy)
    return True
