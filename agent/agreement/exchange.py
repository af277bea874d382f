"""Store I/O of the agreement's background thread: blocking reads that can be cancelled, one retry.

The store must be a connection of our own (`zerotune.agent.job_store`), since a blocking read holds it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("zerotune.agreement")

FIRST_SLICE_S = 10.0
LONGEST_SLICE_S = 60.0
FIRST_POLL_S = 0.005
LONGEST_POLL_S = 2.0


class Closed(Exception):
    """The agreement is being closed; the background thread unwinds."""


class Exchange:
    """One rank's view of the store. Used by one thread; only `close` may come from another."""

    def __init__(self, store: dist.Store) -> None:
        self._store: Any = store
        self._closing = threading.Event()
        self._folder = ""
        self.n_requests = 0

    def enter(self, folder: str) -> None:
        """Keys lie below `folder` from now on; "" is the top."""
        self._folder = f"{folder}/" if folder else ""

    def close(self) -> None:
        """Make a blocking read give up at the end of its time slice."""
        self._closing.set()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Poll until `is_so()`: for what may take minutes or never happen.

        Raises:
            Closed: `close` was called.
            RuntimeError: the store is gone.
        """
        delay_s = FIRST_POLL_S
        while not is_so():
            if self._closing.wait(delay_s):
                raise Closed
            delay_s = min(1.5 * delay_s, LONGEST_POLL_S)

    def poll(self, key: str) -> bytes:
        """The value of `key`, asking now and then: it may never come if another rank ends early.

        Raises:
            Closed: `close` was called.
            RuntimeError: the store is gone.
        """
        self.wait_until(lambda: self.has(key))
        return self.get(key)

    def get(self, key: str) -> bytes:
        """The value of `key`, waiting in the store for what is on its way.

        `close` does not wake a thread that waits here, and one that still waits when the interpreter ends may
        take the process down with it; so this is for values whose writer has no reason left to stop first.

        Raises:
            Closed: `close` was called.
            RuntimeError: the store is gone.
        """
        slice_s = FIRST_SLICE_S
        may_reconnect = True
        while not self._closing.is_set():
            try:
                self._store.set_timeout(timedelta(seconds=slice_s))
                self.n_requests += 2  # c10d asks twice: wait for the key, then its value
                return bytes(self._store.get(self._folder + key))
            except dist.DistStoreError:
                # Nothing wrong, only slow; c10d logs a line each time.
                slice_s = min(2 * slice_s, LONGEST_SLICE_S)
            except RuntimeError:
                if self._closing.is_set() or not may_reconnect or not self._reconnect():
                    raise
                may_reconnect = False
        raise Closed

    def set(self, key: str, value: bytes) -> None:
        """Write `value`; repeated over a fresh connection if this one broke, which changes nothing."""
        self.n_requests += 1
        try:
            self._store.set(self._folder + key, value)
        except RuntimeError:
            if not self._reconnect():
                raise
            self._store.set(self._folder + key, value)

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter; never repeated, since the first attempt may have counted."""
        self.n_requests += 1
        return int(self._store.add(self._folder + key, amount))

    def has(self, key: str, *, everywhere: bool = False) -> bool:
        """Whether `key` has a value; `everywhere`: as seen from the top."""
        self.n_requests += 1
        return bool(self._store.check([key if everywhere else self._folder + key]))

    def delete(self, key: str) -> None:
        """Remove `key`; a store that cannot is left as it is."""
        self.n_requests += 1
        try:
            self._store.delete_key(self._folder + key)
        except RuntimeError as error:
            logger.debug("key %s stays in the store: %s", key, error)

    def _reconnect(self) -> bool:
        """Replace a broken connection, where this torch can open another."""
        try:
            self._store = self._store.clone()
        except (AttributeError, RuntimeError):
            return False
        return True
