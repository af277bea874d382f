"""The daemon's address: only one daemon may have it, and only some clients may reach it.

A daemon may have two addresses: `ipc://` for the ranks of its node, `tcp://` for the daemons of other nodes.
`ipc://` is a file that only its owner may connect to. `tcp://` must be encrypted and authenticated with
CURVE. Keys are ZeroMQ certificates in one folder:

    server.key_secret     the daemon's key pair (mode 0600)
    server.key            its public half, for clients
    client.key_secret     a client's key pair
    clients/*.key         public keys of the clients that may connect
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final

import zmq
import zmq.auth

from ...agent.daemon_link.keys import load_key_pair, refuse_writable
from ...store.errors import UserError
from ...store.lockfile import LockFile, LockHeld
from ...store.paths import ENDPOINT_REMEDY, check_endpoint, runtime_dir
from ...store.private_folders import make_private, open_socket_folder
from .network.clients import AdmittedClients
from .network.gate import Gate

_REMEDY: Final = ENDPOINT_REMEDY


class BoundEndpoint:
    """Keeps `socket` bound to `endpoint`, exclusively, until `release`.

    Raises UserError if another daemon has it, others could reach it, or it cannot be bound.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, curve_dir: Path | None) -> None:
        self._lock: LockFile | None = None
        self._socket_path: Path | None = None
        self._clients: AdmittedClients | None = None
        self._gate: Gate | None = None
        check_endpoint(endpoint)
        scheme, _, place = endpoint.partition("://")
        if scheme == "ipc":
            self._socket_path = Path(place)
            self._lock = _lock(self._socket_path)
        else:
            self._clients = _serve_curve(socket, endpoint, curve_dir)
            try:
                self._gate = Gate(endpoint)
            except UserError:
                self.refuse_clients()
                raise
        try:
            # The socket file is created without rights for others; a stale one is replaced.
            umask = os.umask(0o177)
            try:
                socket.bind(endpoint if self._gate is None else self._gate.inner)
            finally:
                os.umask(umask)
        except zmq.ZMQError as error:
            self.refuse_clients()
            self.release()
            raise UserError(f"endpoint {endpoint} cannot be bound: {error}", _REMEDY) from error

        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT) if self._gate is None else self._gate.address
        """The bound address, with the port that the system chose; 0.0.0.0 stands for any host."""
        if self._clients is not None and self._gate is not None:
            self._clients.watch(self._gate)

    def refuse_clients(self) -> None:
        """Refuse new clients; call before the socket's context ends."""
        if self._clients is not None:
            self._clients.close()
        if self._gate is not None:
            self._gate.close()

    def release(self) -> None:
        """Free the address for others, after the socket's context has ended."""
        if self._gate is not None:
            self._gate.remove()
        if self._lock is not None and self._socket_path is not None:
            with contextlib.suppress(OSError):  # the file system may be read-only now
                self._socket_path.unlink(missing_ok=True)  # the lock's holder owns the file
            self._lock.release()


def check_second(listen: str, endpoint: str, curve_dir: Path | None) -> None:
    """Check that a daemon at `endpoint`, for the ranks of its node, may also `listen` for daemons of other nodes.

    Raises:
        UserError: `listen` is not `tcp://`, or would be open to the network.
    """
    if not (listen.startswith("tcp://") and endpoint.startswith("ipc://")):
        raise UserError(f"--listen {listen} is no second address of {endpoint}", "give tcp://HOST:PORT beside ipc://")
    check_endpoint(listen)
    if curve_dir is None:
        raise UserError(f"endpoint {listen} would be open to the network", "give --curve-keys, or use ipc://")


def make_keys(folder: Path) -> None:
    """Write new keys into `folder`: those of one server, and those of one client that may connect to it.

    Raises UserError if there are keys already, or the folder cannot be written.
    """
    names = ("server.key", "server.key_secret", "client.key", "client.key_secret")
    # Contents come before their folder: this is the order in which they are removed again.
    own = (folder / "clients" / "client.key", *(folder / name for name in names), folder / "clients", folder)
    new = [path for path in own if not path.exists()]
    if any(folder / name not in new for name in names) or list(folder.glob("*.key_secret")):
        raise UserError(f"there are keys in {folder} already", "name another folder, or remove them")
    try:
        make_private(folder / "clients")
        for one in (folder, folder / "clients"):
            one.chmod(0o700)
        umask = os.umask(0o177)
        try:
            for name in ("server", "client"):
                zmq.auth.create_certificates(folder, name)
            shutil.copy(folder / "client.key", folder / "clients")
        finally:
            os.umask(umask)
    except OSError as error:
        for path in new:
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        raise UserError(f"keys cannot be written to {folder}: {error.strerror}", "name another folder") from error


def _lock(path: Path) -> LockFile:
    folder = path.parent
    try:
        make_private(folder)
        os.close(open_socket_folder(folder))
        return LockFile(path.with_name(path.name + ".lock"))
    except LockHeld as held:
        raise UserError(
            f"a daemon is running at ipc://{path} already: `{held.command}` (pid {held.pid})", f"stop it, or {_REMEDY}"
        ) from held
    except OSError as error:
        remedy = "name one of your own in ZEROTUNE_RUNTIME_DIR" if folder == runtime_dir() else _REMEDY
        raise UserError(f"socket directory {folder} cannot be written: {error.strerror}", remedy) from error


def _serve_curve(socket: zmq.Socket[bytes], endpoint: str, curve_dir: Path | None) -> AdmittedClients:
    if curve_dir is None:
        raise UserError(f"endpoint {endpoint} would be open to the network", "give --curve-keys, or use ipc://")
    for folder in (curve_dir, curve_dir / "clients"):
        refuse_writable(folder)
    public_key, secret_key = load_key_pair(curve_dir / "server.key_secret")
    if not (curve_dir / "clients").is_dir():
        raise UserError(f"no client may connect: {curve_dir / 'clients'} is missing", "put clients' public keys there")
    socket.curve_publickey, socket.curve_secretkey = public_key, secret_key
    socket.curve_server = True
    return AdmittedClients(socket.context, curve_dir / "clients")
