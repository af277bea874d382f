"""Store I/O of the agreement's background thread: blocking reads that can be cancelled, one retry, a spare store.

The store must be a connection of our own (`zerotune.agent.job_store`), since a blocking read holds it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from zerotune.agent.agreement.spare_store import may_live

logger = logging.getLogger("zerotune.agreement")

FIRST_SLICE_S = 10.0
LONGEST_SLICE_S = 60.0
FIRST_POLL_S = 0.005
LONGEST_POLL_S = 2.0
RECONNECT_TIMEOUT = timedelta(seconds=5)

Answer = TypeVar("Answer")


class Closed(Exception):
    """The agreement is being closed; the background thread unwinds."""


class Exchange:
    """One rank's view of the store. Used by one thread; only `close` may come from another."""

    def __init__(self, store: dist.Store) -> None:
        self._store: Any = store
        self.spare: Any = None
        """Where everything but counts is written first, and looked for when `store` is gone; None without one."""
        self.has_lost_store = False
        """The spare is all that is left."""
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
        mends = iter((self._reconnect, self._take_to_spare))
        while not self._closing.is_set():
            try:
                self._store.set_timeout(timedelta(seconds=slice_s))
                self.n_requests += 2  # c10d asks twice: wait for the key, then its value
                return bytes(self._store.get(self._folder + key))
            except dist.DistStoreError:
                # Nothing wrong, only slow; c10d logs a line each time. Or rank 0 alone has lost the store.
                slice_s = min(2 * slice_s, LONGEST_SLICE_S)
                if self._is_in_spare(key):
                    self._take_to_spare()
            except RuntimeError:
                if self._closing.is_set() or not any(mend() for mend in mends):
                    raise
        raise Closed

    def set(self, key: str, value: bytes) -> None:
        """Write `value`, first to the spare; repeated where a connection broke, which changes nothing."""
        self.n_requests += 1
        name = self._folder + key
        self._ask_spare(lambda spare: spare.set(name, value), None)
        self._repeat(lambda: self._store.set(name, value))

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter; never repeated on one store, since the first attempt may have counted."""
        self.n_requests += 1
        try:
            return int(self._store.add(self._folder + key, amount))
        except RuntimeError:
            if not self._take_to_spare():
                raise
            return int(self._store.add(self._folder + key, amount))

    def has(self, key: str, *, everywhere: bool = False) -> bool:
        """Whether `key` has a value; `everywhere`: as seen from the top."""
        self.n_requests += 1
        name = key if everywhere else self._folder + key
        return self._repeat(lambda: bool(self._store.check([name]))) or self._is_in_spare(key)

    def delete(self, key: str) -> None:
        """Remove `key`; a store that cannot is left as it is."""
        self.n_requests += 1
        name = self._folder + key
        self._ask_spare(lambda spare: spare.delete_key(name), None)
        try:
            self._store.delete_key(name)
        except RuntimeError as error:
            logger.debug("key %s stays in the store: %s", key, error)

    def _repeat(self, request: Callable[[], Answer]) -> Answer:
        """What the store answers; asked again over a fresh connection, then of the spare."""
        mends = iter((self._reconnect, self._take_to_spare))
        while True:
            try:
                return request()
            except RuntimeError:
                if not any(mend() for mend in mends):
                    raise

    def _is_in_spare(self, key: str) -> bool:
        return self._ask_spare(lambda spare: bool(spare.check([self._folder + key])), False)

    def _ask_spare(self, request: Callable[[Any], Answer], otherwise: Answer) -> Answer:
        """What the spare answers; one that breaks is none any more."""
        if self.spare is not None:
            try:
                return request(self.spare)
            except RuntimeError:
                self.spare = None
        return otherwise

    def _take_to_spare(self) -> bool:
        if self.spare is None:
            return False
        self._store, self.spare, self.has_lost_store = self.spare, None, True
        return True

    def _reconnect(self) -> bool:
        """Replace a broken connection, where this torch can open another."""
        if not may_live(self._store):
            return False
        try:
            self._store.set_timeout(RECONNECT_TIMEOUT)
            self._store = self._store.clone()
        except (AttributeError, RuntimeError):
            return False
        return True
