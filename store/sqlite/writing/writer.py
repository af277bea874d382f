"""The store's only writer: a thread that turns queued operations into few large transactions.

While SQLite can write nothing (a full disk, say), what is queued waits in memory and is tried again, in its order;
it is lost only when the queue is full, or when the store is closed before there is room.
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
"""How long a batch is gathered before it is written; kill -9 loses at most this and one transaction."""
RETRY_S: Final = 1.0
"""How long after a failure SQLite is tried again."""
_OUTAGES: Final = (
    "database or disk is full",
    "disk I/O error",
    "attempt to write a readonly database",
    "database is locked",
    "unable to open database file",
)
"""SQLite's messages when it can write nothing for now; any other is the fault of one operation."""


def _is_outage(error: Exception) -> bool:
    """Whether nothing can be written for now."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, sqlite3.OperationalError) and any(words in str(error) for words in _OUTAGES)


class Writer:
    """Owns thread `zerotune-store-writer`: runs operations in order, as many per transaction as have gathered.

    `connection` must be in autocommit mode and is used by this thread alone. `on_rollback` forgets
    whatever operations remember of a transaction that was undone. `begin_anew` is called with the error that shows
    that the file is damaged, and with what does again, in the new file, all that was written since the old one was
    last seen to be sound; it closes the connection, and returns one to a sound file. `watch` looks for such damage.
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
        """Rows committed."""
        self._connection = connection
        self._checkpoints = Checkpoints(connection)
        self._on_rollback = on_rollback
        self._begin_anew = begin_anew
        self._damaged: sqlite3.DatabaseError | None = None
        """What is wrong with a file that could not be left yet; its connection is closed."""
        self._watch = watch
        self._recent = RecentOperations()
        self._error, self._failed_at_s = "", time.monotonic()
        self._is_out = False
        self._n_lost_before = 0
        """Rows lost before the outage."""
        self._n_tries = 0
        """Failed tries to write."""
        self._pending: deque[Entry] = deque()
        self._n_pending_rows = self._pending_room = 0
        self._n_rows_tried = 0
        """Rows that were taken out of the queue and are not written yet."""
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
        """Queue an operation, unless more would then wait than MAX_PENDING_ROWS.

        Args:
            operation: called by the writer's thread in its next transaction.
            n_rows: rows that it writes, for the count of what waits.
            is_essential: may exceed the limit by ESSENTIAL_ROWS.
            room: rows that take as much memory, if that is more.

        Returns:
            False if it was refused; its rows are then counted as lost.
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
        """Wait until everything queued so far is committed; False when that took too long, or SQLite cannot write."""
        with self._changed:
            target, n_tries = self._n_put, self._n_tries
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._n_done >= target or self._n_tries > n_tries, timeout_s)
            return self._n_done >= target

    def close(self) -> None:
        """Write what is queued, cut the log and end the thread; what cannot be written now is lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # ---- the writer's thread -----------------------------------------------------------------

    def _run(self) -> None:
        while batch := self._next_batch():
            # While nothing can be written one operation shows that; a long queue would be tried over and over.
            first = len(batch) if not self._is_out else 1
            left = self._write(batch[:first])
            left += batch[first:] if left else self._write(batch[first:])
            if not left and self._is_out:
                self._say_it_is_over()
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
        """If it is time to, and not while the store is being closed."""
        if self._watch.due_in_s or self._closing:
            return
        if (error := self._watch.look()) is not None:
            self._leave_damaged_file(error)
        elif self._damaged is None:
            self._recent.forget()

    def _leave_damaged_file(self, error: sqlite3.DatabaseError) -> str:
        """Go on in a sound file; why that cannot be done now, empty if it is done."""
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
        """Wait for it, so long at most."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._pending) or self._closing, timeout_s)

    def _write(self, batch: list[Entry]) -> list[Entry]:
        """Commit `batch`, in halves where the whole cannot be written; what is left when SQLite can write no more."""
        if not batch:
            return []
        error = self._damaged or self._commit(batch)
        if isinstance(error, sqlite3.DatabaseError) and is_damage(error):
            problem = self._leave_damaged_file(error)
            error = None if problem else self._commit(batch)
            if problem or (error is not None and is_damage(error)):
                self._say_it_began(problem or str(error))
                return batch
        if error is None:
            return []
        if len(batch) > 1:
            half = len(batch) // 2
            left = self._write(batch[:half])
            return left + batch[half:] if left else self._write(batch[half:])
        if _is_outage(error):
            self._say_it_began(reason(error))
            return batch
        with self._changed:
            self._lose(batch[0].n_rows, str(error))
        return []

    def _commit(self, batch: list[Entry]) -> Exception | None:
        """One transaction; returns why it was undone, if it was."""
        try:
            if self._connection.in_transaction:  # one that could not be undone when it failed
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

    # ---- what is said of it ------------------------------------------------------------------

    def _lose(self, n_rows: int, why: str) -> None:
        """Count rows as lost; says so once, and once in each outage."""
        if not self.n_lost or (self._is_out and self.n_lost == self._n_lost_before):
            _log.error("the store cannot be written, records are being lost: %s", why)
        self.n_lost += n_rows
        if not self._is_out:
            self._error, self._failed_at_s = why, time.monotonic()

    def _say_it_began(self, error: str) -> None:
        with self._changed:
            is_news = not self._is_out
            self._is_out, self._error = True, error
            if is_news:
                self._failed_at_s, self._n_lost_before = time.monotonic(), self.n_lost
        if is_news:
            _log.error("the store cannot be written, what is recorded waits in memory: %s", error)

    def _say_it_is_over(self) -> None:
        with self._changed:
            self._is_out = False
            n_lost = self.n_lost - self._n_lost_before
            if n_lost:
                self._failed_at_s = time.monotonic()
        lost = f"{n_lost:,} records are lost" if n_lost else "nothing is lost"
        _log.warning("the store is written again; %s", lost)
