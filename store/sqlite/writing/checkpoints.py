"""When what SQLite has logged (`STORE-wal`) is copied into the store's file, and the log is cut to nothing.

SQLite itself copies after every 16 MiB (`PRAGMA wal_autocheckpoint` in `zerotune.store.sqlite.opening`), which a
small job never fills. None of it waits for readers, and it is done by the writer's thread: whoever records only queues.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Final

EVERY_S: Final = 5.0
"""How long what is committed stays in the log alone, while the store is written."""
IDLE_S: Final = 2.0
"""How long nothing must have been written before the log is cut."""


class Checkpoints:
    """Of one writing connection, used by its thread alone."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.is_log_left = True
        """Whether the log may hold anything: a writer that was killed has left its own."""
        self._connection = connection
        (self._busy_timeout_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
        self._done_at_s = time.monotonic()

    def committed(self) -> None:
        """After a transaction: copy, if it is time to."""
        self.is_log_left = True
        if time.monotonic() - self._done_at_s >= EVERY_S:
            self._run("PASSIVE")

    def cut(self) -> None:
        """Copy all and cut the log; if a reader still needs a part of it, that stays and `is_log_left` is True."""
        # Else it would wait for readers.
        self.is_log_left = not (self._wait_ms(0) and self._run("TRUNCATE"))
        self._wait_ms(self._busy_timeout_ms)

    def _run(self, kind: str) -> bool:
        """Whether it was done; if not, e.g. on a full disk, the log still holds everything, and this is tried again."""
        self._done_at_s = time.monotonic()
        try:
            is_blocked, *_ = self._connection.execute(f"PRAGMA wal_checkpoint({kind})").fetchone()
        except (sqlite3.Error, MemoryError):
            return False
        return not is_blocked

    def _wait_ms(self, timeout_ms: int) -> bool:
        """How long the connection waits for others from now on; whether that was set."""
        try:
            self._connection.execute(f"PRAGMA busy_timeout = {timeout_ms}")
        except (sqlite3.Error, MemoryError):
            return False
        return True
