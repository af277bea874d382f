"""The store's only writer: a thread that turns queued operations into few large transactions."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

_log = logging.getLogger("zerotune.store")

Operation = Callable[[sqlite3.Connection], None]

MAX_PENDING_ROWS: Final = 500_000
LINGER_S: Final = 0.1
"""How long a batch is gathered before it is written; kill -9 loses at most this and one transaction."""


class Writer:
    """Runs operations in order on its own thread, as many per transaction as have gathered.

    `connection` must be in autocommit mode and is used by this thread alone. `on_rollback` forgets
    whatever operations remember of a transaction that was undone.
    """

    def __init__(self, connection: sqlite3.Connection, on_rollback: Callable[[], None]) -> None:
        self.n_dropped = 0
        """Rows refused because the queue was full."""
        self.n_failed = 0
        """Rows that SQLite refused to write (a full disk, say)."""
        self.n_written = 0
        """Rows committed."""
        self._connection = connection
        self._on_rollback = on_rollback
        self._n_lost_now = 0
        """Rows lost since SQLite could last write."""
        self._pending: deque[tuple[Operation, int]] = deque()
        self._n_pending_rows = 0
        self._n_put = 0
        self._n_done = 0
        self._changed = threading.Condition()
        self._hurry = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="zerotune-store-writer", daemon=True)
        self._thread.start()

    def put(self, operation: Operation, n_rows: int) -> bool:
        """Queue `operation`; False (and counted) when that would exceed MAX_PENDING_ROWS."""
        with self._changed:
            if self._closing or self._n_pending_rows + n_rows > MAX_PENDING_ROWS:
                self.n_dropped += n_rows
                return False
            self._pending.append((operation, n_rows))
            self._n_pending_rows += n_rows
            self._n_put += 1
            if len(self._pending) == 1:
                self._changed.notify_all()
            return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued so far is committed; False when that took too long."""
        with self._changed:
            target = self._n_put
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._n_done >= target, timeout_s)

    def close(self) -> None:
        """Write what is queued and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            if not self._write(batch) and len(batch) > 1:
                for entry in batch:  # find the one that cannot be written, keep the others
                    self._write([entry])
            with self._changed:
                self._n_done += len(batch)
                self._changed.notify_all()

    def _next_batch(self) -> list[tuple[Operation, int]]:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            self._changed.wait_for(lambda: self._hurry or self._closing, LINGER_S)
            batch = list(self._pending)
            self._pending.clear()
            self._n_pending_rows = 0
            self._hurry = False
            return batch

    def _write(self, batch: list[tuple[Operation, int]]) -> bool:
        n_rows = sum(n for _, n in batch)
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for operation, _ in batch:
                operation(self._connection)
            self._connection.execute("COMMIT")
        except Exception as error:  # a value SQLite cannot hold must not end the writer either
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._on_rollback()
            if len(batch) == 1:
                is_outage = isinstance(error, sqlite3.OperationalError)  # not of this one record alone
                if self.n_failed == 0 or (is_outage and not self._n_lost_now):
                    _log.error("the store cannot be written, records are being lost: %s", error)
                self.n_failed += n_rows
                self._n_lost_now += n_rows if is_outage else 0
            return False
        if self._n_lost_now:
            _log.warning("the store is written again; %s records are lost", f"{self._n_lost_now:,}")
            self._n_lost_now = 0
        self.n_written += n_rows
        return True
