"""The store's only writer: a thread that turns queued operations into few large transactions.

While SQLite can write nothing (a full disk, say), queued operations wait in memory and are tried again in their order.
They are lost only if the queue is full, or if the store is closed before there is room.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from ...errors import reason
from ...wire import StoreState
from ..damage.damage import DamageWatch, is_damage
from ..opening import Redo
from .checkpoints import IDLE_S, Checkpoints
from .recent import Entry, Operation, RecentOperations

_log = logging.getLogger("zerotune.store")

MAX_PENDING_ROWS: Final = 500_000
ESSENTIAL_ROWS: Final = 100_000
"""Extra room for rows that are written only once: jobs, decisions, models."""
LINGER_S: Final = 0.1
"""How long a batch is collected before it is written; kill -9 loses at most this and one transaction."""
RETRY_S: Final = 1.0
"""How long after a failure SQLite is tried again."""
_OUTAGES: Final = (
    "database or disk is full",
    "disk I/O error",
    "attempt to write a readonly database",
    "database is locked",
    "unable to open database file",
)
"""SQLite's messages if it can write nothing for now; any other error is the fault of one operation."""


def _is_outage(error: Exception) -> bool:
    """Whether the error means that SQLite can write nothing for now."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, sqlite3.OperationalError) and any(words in str(error) for words in _OUTAGES)


class Writer:
    """Owns thread `zerotune-store-writer`, which runs operations in order, all waiting ones in one transaction.

    `connection` must be in autocommit mode; only this thread uses it. `on_rollback` clears what operations remember of
    a transaction that was rolled back. `watch` looks for damage. `begin_anew` is called with the error that shows
    damage, and with a function that repeats recent operations in the new file. It closes the connection, and returns
    one to a sound file.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        on_rollback: Callable[[], None],
        begin_anew: Callable[[sqlite3.DatabaseError, Redo], sqlite3.Connection],
        watch: DamageWatch,
    ) -> None:
        self.n_lost = 0
        """Rows that did not fit into the queue, or that SQLite refused."""
        self.n_written = 0
        self._connection = connection
        self._checkpoints = Checkpoints(connection)
        self._on_rollback = on_rollback
        self._begin_anew = begin_anew
        self._damaged: sqlite3.DatabaseError | None = None
        """Error of a damaged file that could not be replaced yet; its connection is closed."""
        self._watch = watch
        self._recent = RecentOperations()
        self._error, self._failed_at_s = "", time.monotonic()
        self._is_out = False
        self._n_lost_before = 0
        """Rows lost before the outage."""
        self._n_tries = 0
        self._pending: deque[Entry] = deque()
        self._n_pending_rows = self._pending_room = 0
        self._n_rows_tried = 0
        """Rows taken out of the queue and not written yet."""
        self._n_put = 0
        self._n_done = 0
        self._changed = threading.Condition()
        self._hurry = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="zerotune-store-writer", daemon=True)
        self._thread.start()

    @property
    def state(self) -> StoreState:
        """Whether rows can be written, and what was lost."""
        with self._changed:
            n_waiting = self._n_pending_rows + self._n_rows_tried if self._is_out else 0
            ago_s = time.monotonic() - self._failed_at_s if self._error else 0.0
            return StoreState(self._is_out, self._error, ago_s, n_waiting, self.n_lost)

    def put(self, operation: Operation, n_rows: int, *, is_essential: bool = False, room: int = 0) -> bool:
        """Queue an operation, unless more than MAX_PENDING_ROWS rows would then wait.

        False means that it was refused; its rows are then counted as lost. The writer's thread calls the operation in
        its next transaction.

        Args:
            n_rows: rows that it writes.
            is_essential: may exceed the limit by ESSENTIAL_ROWS.
            room: its memory in rows, if that is more.
        """
        entry, most = Entry(operation, n_rows, max(n_rows, room)), MAX_PENDING_ROWS + ESSENTIAL_ROWS * is_essential
        with self._changed:
            if self._closing or self._pending_room + entry.room > most:
                self._lose(n_rows, "more was recorded than could be written")
                return False
            self._pending.append(entry)
            self._n_pending_rows += n_rows
            self._pending_room += entry.room
            self._n_put += 1
            if len(self._pending) == 1:
                self._changed.notify_all()
            return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued operations are committed; False if that takes too long, or SQLite cannot write."""
        with self._changed:
            target, n_tries = self._n_put, self._n_tries
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._n_done >= target or self._n_tries > n_tries, timeout_s)
            return self._n_done >= target

    def close(self) -> None:
        """Write queued operations, truncate the log and end the thread; rows that cannot be written now are lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # ---- the writer's thread -----------------------------------------------------------------

    def _run(self) -> None:
        while batch := self._next_batch():
            # While nothing can be written, one operation is tried, not the whole queue again and again.
            first = len(batch) if not self._is_out else 1
            left = self._write(batch[:first])
            left += batch[first:] if left else self._write(batch[first:])
            if not left and self._is_out:
                self._outage_ended()
            with self._changed:
                if left and self._closing:
                    self._lose(sum(entry.n_rows for entry in left), self._error)
                    left = []
                self._pending.extendleft(reversed(left))
                self._n_pending_rows += sum(entry.n_rows for entry in left)
                self._pending_room += sum(entry.room for entry in left)
                self._n_done += len(batch) - len(left)
                self._n_tries += bool(left)
                self._n_rows_tried = 0
                self._changed.notify_all()
            if not left:
                self._checkpoints.committed()
        if self._damaged is None:
            self._checkpoints.cut()

    def _next_batch(self) -> list[Entry]:
        while not self._has_work(IDLE_S if self._checkpoints.is_log_left else self._watch.due_in_s):
            if self._checkpoints.is_log_left:
                self._checkpoints.cut()
            self._look_for_damage()
        self._look_for_damage()
        with self._changed:
            self._changed.wait_for(lambda: self._hurry or self._closing, RETRY_S if self._is_out else LINGER_S)
            batch = list(self._pending)
            self._pending.clear()
            self._n_rows_tried, self._n_pending_rows, self._pending_room = self._n_pending_rows, 0, 0
            self._hurry = False
            return batch

    def _look_for_damage(self) -> None:
        """Check the file if that is due, but not while the store is being closed."""
        if self._watch.due_in_s or self._closing:
            return
        if (error := self._watch.look()) is not None:
            self._leave_damaged_file(error)
        elif self._damaged is None:
            self._recent.forget()

    def _leave_damaged_file(self, error: sqlite3.DatabaseError) -> str:
        """Replace the damaged file; returns why that is impossible now, empty on success."""
        self._damaged = error
        try:
            self._connection = self._begin_anew(error, self._recent.redo)
        except Exception as failure:  # no room for another file, say
            self._checkpoints.is_log_left = False
            return f"{error}; {failure}"
        self._damaged, self._checkpoints = None, Checkpoints(self._connection)
        self._recent.forget()
        return ""

    def _has_work(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for operations or closing."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._pending) or self._closing, timeout_s)

    def _write(self, batch: list[Entry]) -> list[Entry]:
        """Commit `batch`, in halves if the whole fails; returns what is left if SQLite can write no more."""
        if not batch:
            return []
        error = self._damaged or self._commit(batch)
        if isinstance(error, sqlite3.DatabaseError) and is_damage(error):
            problem = self._leave_damaged_file(error)
            error = None if problem else self._commit(batch)
            if problem or (error is not None and is_damage(error)):
                self._outage_began(problem or str(error))
                return batch
        if error is None:
            return []
        if len(batch) > 1:
            half = len(batch) // 2
            left = self._write(batch[:half])
            return left + batch[half:] if left else self._write(batch[half:])
        if _is_outage(error):
            self._outage_began(reason(error))
            return batch
        with self._changed:
            self._lose(batch[0].n_rows, str(error))
        return []

    def _commit(self, batch: list[Entry]) -> Exception | None:
        """Run one transaction; returns the error if it was rolled back."""
        try:
            if self._connection.in_transaction:  # an earlier rollback failed
                self._connection.execute("ROLLBACK")
            self._connection.execute("BEGIN IMMEDIATE")
            marks = self._recent.marks(self._connection)
            for entry in batch:
                entry.operation(self._connection)
            self._connection.execute("COMMIT")
        except Exception as error:  # a value SQLite cannot hold must not end the writer either
            with contextlib.suppress(sqlite3.Error, MemoryError):
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            self._on_rollback()
            return error
        self.n_written += sum(entry.n_rows for entry in batch)
        self._recent.committed(marks, batch)
        return None

    # ---- log messages ------------------------------------------------------------------------

    def _lose(self, n_rows: int, why: str) -> None:
        """Count rows as lost; logs that once, and once in each outage."""
        if not self.n_lost or (self._is_out and self.n_lost == self._n_lost_before):
            _log.error("the store cannot be written, records are being lost: %s", why)
        self.n_lost += n_rows
        if not self._is_out:
            self._error, self._failed_at_s = why, time.monotonic()

    def _outage_began(self, error: str) -> None:
        with self._changed:
            is_news = not self._is_out
            self._is_out, self._error = True, error
            if is_news:
                self._failed_at_s, self._n_lost_before = time.monotonic(), self.n_lost
        if is_news:
            _log.error("the store cannot be written, what is recorded waits in memory: %s", error)

    def _outage_ended(self) -> None:
        with self._changed:
            self._is_out = False
            n_lost = self.n_lost - self._n_lost_before
            if n_lost:
                self._failed_at_s = time.monotonic()
        lost = f"{n_lost:,} records are lost" if n_lost else "nothing is lost"
        _log.warning("the store is written again; %s", lost)
