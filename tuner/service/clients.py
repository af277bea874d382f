"""Who may connect to a daemon at `tcp://`: the clients whose public keys are in a folder at that moment."""

from __future__ import annotations

import contextlib
import logging
import os
import socket as sockets
import stat
import threading
from pathlib import Path
from typing import Any, Final

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

_log = logging.getLogger("zerotune.daemon")

LOOK_EVERY_S: Final = 1.0
"""How soon the connections of a client end whose key is taken out of the folder; new ones are refused at once."""


class AdmittedClients:
    """Answers ZeroMQ's question whether a client may connect, and ends connections whose answer has changed.

    Args:
        context: of the socket that is served.
        folder: of the clients' public keys.
    """

    def __init__(self, context: zmq.Context[Any], folder: Path) -> None:
        self._folder = folder
        self._admitted: set[bytes] = set()
        self._closing = threading.Event()
        self._watch: threading.Thread | None = None
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client with this public key may connect; ZeroMQ's authenticator asks under this name."""
        may_connect = key in self._keys()
        if may_connect:
            self._admitted.add(key)
        return may_connect

    def watch(self, port: int) -> None:
        """From now on, end the connections to a port of this process when one of those admitted no longer is."""
        self._watch = threading.Thread(target=self._look, args=(port,), name="zerotune-clients", daemon=True)
        self._watch.start()

    def close(self) -> None:
        """Call before the socket's context ends."""
        self._closing.set()
        if self._watch is not None:
            self._watch.join()
        self._authenticator.stop()

    def _look(self, port: int) -> None:
        while not self._closing.wait(LOOK_EVERY_S):
            if revoked := self._admitted - self._keys():
                self._admitted -= revoked
                _log.warning("%d keys were taken out of %s: all at tcp:// connect anew", len(revoked), self._folder)
                _end_connections(port)

    def _keys(self) -> set[bytes]:
        found = set()
        for path in self._folder.glob("*.key"):
            with contextlib.suppress(OSError, ValueError):  # taken away meanwhile, or no key
                found.add(zmq.auth.load_certificate(path)[0])
        return found


def _end_connections(port: int) -> None:
    """Shut this process's TCP connections at its own `port`; ZeroMQ does not say which one is whose, nor ends one."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with sockets.socket(fileno=os.dup(int(name))) as one:
                if one.family in (sockets.AF_INET, sockets.AF_INET6) and one.getsockname()[1] == port:
                    one.getpeername()  # what only listens has none, and is left alone
                    one.shutdown(sockets.SHUT_RDWR)
