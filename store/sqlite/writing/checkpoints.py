"""Checkpoints: SQLite's log (`STORE-wal`) is copied into the store's file and truncated.

SQLite itself copies after every 16 MiB (`PRAGMA wal_autocheckpoint` in `zerotune.store.sqlite.opening`), which a
small job never fills. Checkpoints do not wait for readers; they run on the writer's thread, so recording never waits.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Final

EVERY_S: Final = 5.0
"""How long committed rows stay only in the log while the store is written."""
IDLE_S: Final = 2.0
"""How long nothing must have been written before the log is truncated."""


class Checkpoints:
    """Checkpoints of one writing connection; only its thread uses them."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.is_log_left = True
        """Whether the log may hold rows: a killed writer may have left some."""
        self._connection = connection
        (self._busy_timeout_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
        self._done_at_s = time.monotonic()

    def committed(self) -> None:
        """Copy the log after a transaction if that is due."""
        self.is_log_left = True
        if time.monotonic() - self._done_at_s >= EVERY_S:
            self._run("PASSIVE")

    def cut(self) -> None:
        """Copy and truncate the log; if a reader still needs a part of it, it stays and `is_log_left` is True."""
        # Else it would wait for readers.
        self.is_log_left = not (self._wait_ms(0) and self._run("TRUNCATE"))
        self._wait_ms(self._busy_timeout_ms)

    def _run(self, kind: str) -> bool:
        """Whether it succeeded; if not (a full disk, say), the log keeps everything, and the writer tries again."""
        self._done_at_s = time.monotonic()
        try:
            is_blocked, *_ = self._connection.execute(f"PRAGMA wal_checkpoint({kind})").fetchone()
        except (sqlite3.Error, MemoryError):
            return False
        return not is_blocked

    def _wait_ms(self, timeout_ms: int) -> bool:
        """Set how long the connection waits for others; returns whether that succeeded."""
        try:
            self._connection.execute(f"PRAGMA busy_timeout = {timeout_ms}")
        except (sqlite3.Error, MemoryError):
            return False
        return True
