"""Admits clients to a daemon at `tcp://` while their public keys are in a folder."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ....agent.daemon_link.keys import load_certificate
from .gate import Gate

_log = logging.getLogger("zerotune.daemon")

LOOK_EVERY_S: Final = 1.0
"""If a key is removed from the folder, its client's connections end within this time; new ones are refused at once."""


class AdmittedClients:
    """Owns thread `zerotune-clients`: decides which clients may connect, and ends connections of revoked keys."""

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
        try:
            may_connect = key in self._keys()
        except OSError as error:  # for example, no descriptor is left: an admitted client tries again
            _log.warning("the keys in %s cannot be read: %s", self._folder, error)
            return False
        if may_connect:
            self._admitted.add(key)
        return may_connect

    def watch(self, gate: Gate) -> None:
        """From now on, keep a gate open, and end all its connections if an admitted client's key is removed."""
        self._watch = threading.Thread(target=self._look, args=(gate,), name="zerotune-clients", daemon=True)
        self._watch.start()

    def close(self) -> None:
        """End the thread; call before the socket's context ends."""
        self._closing.set()
        if self._watch is not None:
            self._watch.join()
        self._authenticator.stop()

    def _look(self, gate: Gate) -> None:
        is_first = True
        while is_first or not self._closing.wait(LOOK_EVERY_S):
            is_first = False
            try:
                gate.keep_open()
                revoked = self._admitted - self._keys()
            except OSError as error:  # temporary: a removed key must end its owner's connection later
                _log.warning("clients of %s are not looked at now: %s", self._folder, error)
                continue
            if revoked:
                self._admitted -= revoked
                _log.warning("%d keys were taken out of %s: all at tcp:// connect anew", len(revoked), self._folder)
                gate.end_connections()

    def _keys(self) -> set[bytes]:
        found = set()
        for path in self._folder.glob("*.key"):
            with contextlib.suppress(OSError, ValueError):  # the file was removed meanwhile, or is no key
                found.add(load_certificate(path)[0])
        return found
