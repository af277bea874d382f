"""A daemon's `tcp://` address: a listening socket, and the doorkeeper that forwards its connections."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket as sockets
import subprocess
from typing import Final

import psutil

from ....store.errors import UserError
from ....store.foreign.own_python import python_with
from ....store.paths import MAX_IPC_PATH_BYTES
from ...scratch import ScratchFolder

_log = logging.getLogger("zerotune.daemon")

MAX_STRANGERS: Final = 64
"""Most connections that have not shown a key."""
BACKLOG: Final = 1024
LEAST_FILES: Final = 256
"""Open files that a daemon at `tcp://` needs: a quarter is for peers with keys, an eighth for strangers."""


class Gate:
    """Listens at construction; peers reach `inner` once `keep_open` was called.

    Raises UserError if the address cannot be bound, or too few files may be open.
    """

    def __init__(self, endpoint: str) -> None:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most < LEAST_FILES:
            raise UserError(f"only {most} files may be open, {endpoint} needs {LEAST_FILES}", "raise `ulimit -n`")
        self._most = [str(min(MAX_STRANGERS, most // 8)), str(most // 4)]
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        try:
            self._listening = sockets.create_server(_address(host, port), backlog=BACKLOG)
        except OSError as error:
            remedy = "give another address: --listen, --endpoint or ZEROTUNE_ENDPOINT"
            raise UserError(f"endpoint {endpoint} cannot be bound: {error.strerror}", remedy) from error
        self.address = "tcp://{}:{}".format(*self._listening.getsockname())
        self._folder = ScratchFolder("zerotune-door-")
        if len(f"{self._folder.path}/door.sock") > MAX_IPC_PATH_BYTES:
            self._folder.cleanup()
            self._folder = ScratchFolder("zerotune-door-", "/tmp")
        self.inner = f"ipc://{self._folder.path / 'door.sock'}"
        """The daemon's own address, which the doorkeeper connects to."""
        self._process: subprocess.Popen[bytes] | None = None

    def keep_open(self) -> None:
        """Start the doorkeeper unless it runs; call this regularly. OSError: no process can be started."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            _log.error(
                "the doorkeeper at %s ended with code %d: another begins", self.address, self._process.returncode
            )
        fd = self._listening.fileno()
        words = [str(fd), self.inner.removeprefix("ipc://"), *self._most]
        self._process = subprocess.Popen(
            [*python_with("zerotune.tuner.service.network.doorkeeper"), *words],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[fd], start_new_session=True,
        )  # fmt: skip

    def end_connections(self) -> None:
        """End all connections; admitted clients connect anew."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"e")
                self._process.stdin.flush()

    def close(self) -> None:
        """Refuse new connections."""
        self._listening.close()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def remove(self) -> None:
        """Remove the folder, after the daemon's socket was closed."""
        self._folder.cleanup()


def _address(host: str, port: str) -> tuple[str, int]:
    """The IPv4 address of a host given by address, name or network interface; *: any host, any port."""
    number = 0 if port == "*" else int(port)
    if host == "*":
        return "0.0.0.0", number
    for one in psutil.net_if_addrs().get(host, ()):
        if one.family == sockets.AF_INET:
            return one.address, number
    found = sockets.getaddrinfo(host, number, sockets.AF_INET, sockets.SOCK_STREAM)
    return str(found[0][4][0]), number
