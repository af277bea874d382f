"""Requests to the job's store by the agreement's thread. No request waits in the store, and each may be repeated.

The store must be a connection of the agent's own (`zerotune.agent.job_store`), since a request blocks it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch.distributed as dist

logger = logging.getLogger("zerotune.agreement")

FIRST_POLL_S: Final = 0.005
LATENESS: Final = 0.1
"""Time between polls, as a share of the time waited so far."""
LONGEST_POLL_S: Final = 30.0
TRIES: Final = 3
PAUSE_S: Final = 0.2
"""Between two tries of a request that failed."""
_NOTHING: Final = "\0"
"""A value that is never written. Compared with it, `compare_set` reads without waiting, in one request."""

Found = TypeVar("Found")


class Closed(Exception):
    """The agreement is being closed; its thread unwinds."""


class Exchange:
    """One rank's view of the store. Used by one thread; only `close` may come from another.

    A request that fails is repeated over a fresh connection before RuntimeError is raised. The store may have carried
    it out before: all requests but `add` and `append` are idempotent.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store: Any = store
        self._closing = threading.Event()
        self._folder = ""
        self.n_requests = 0

    def enter(self, folder: str) -> None:
        """From now on keys lie below `folder`; "" is the top."""
        self._folder = f"{folder}/" if folder else ""

    def close(self) -> None:
        """End the polls, which raise `Closed`."""
        self._closing.set()

    def wait_until(self, is_so: Callable[[], bool], least_s: float = 0.0) -> None:
        """Poll until `is_so()`, for conditions that may take minutes or never hold.

        Raises:
            Closed: `close` was called.
            RuntimeError: the store is gone.
        """
        began_s = time.monotonic()
        while not is_so():
            waited_s = time.monotonic() - began_s
            if self._closing.wait(min(max(FIRST_POLL_S, least_s, LATENESS * waited_s), LONGEST_POLL_S)):
                raise Closed

    def read(self, key: str, *, everywhere: bool = False) -> bytes | None:
        """The value of `key`; None: it has none yet. `everywhere`: `key` is relative to the top."""
        name = key if everywhere else self._folder + key
        value = bytes(self._request(lambda store: store.compare_set(name, _NOTHING, _NOTHING)))
        return None if value == _NOTHING.encode() else value

    def set(self, key: str, value: bytes) -> None:
        """Write `value`."""
        self._request(lambda store: store.set(self._folder + key, value))

    def set_once(self, key: str, value: bytes) -> bytes:
        """Write `value` unless `key` has a value; returns the value that it has from now on."""
        return bytes(self._request(lambda store: store.compare_set(self._folder + key, b"", value)))

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter and return it; a broken connection may add twice."""
        return int(self._request(lambda store: store.add(self._folder + key, amount)))

    def append(self, key: str, value: bytes) -> None:
        """Append `value` to that of `key`; a broken connection may append twice."""
        self._request(lambda store: store.append(self._folder + key, value))

    def delete(self, key: str) -> None:
        """Remove `key`, if the store can."""
        self.n_requests += 1
        try:
            self._store.delete_key(self._folder + key)
        except RuntimeError as error:
            logger.debug("key %s stays in the store: %s", key, error)

    def _request(self, send: Callable[[Any], Found]) -> Found:
        for n_left in reversed(range(TRIES)):
            self.n_requests += 1
            try:
                return send(self._store)
            except RuntimeError:
                if n_left == 0 or self._closing.wait(PAUSE_S):
                    raise
                self._reconnect()
        raise AssertionError("unreachable")

    def _reconnect(self) -> None:
        """Replace a broken connection, if this torch can open another one."""
        try:
            self._store = self._store.clone()
        except (AttributeError, RuntimeError) as error:
            logger.debug("the job's store cannot be reached again: %s", error)
