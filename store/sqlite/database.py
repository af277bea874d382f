"""The store: one SQLite file, many readers, one writer thread.

`record_*`, `update_job` and `save_model` only queue and never block; reads see committed rows
(call `flush` first to read your own rows). Rows beyond the queue's limit (500,000) are dropped and counted, so
bulk importers call `flush` between blocks. While the disk is full, rows wait in that queue.
Times are seconds since the epoch. Measurements are arrays of dtype MEASUREMENT or STORED, shape (n,), oldest first.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec

from ..errors import StoreError
from ..lockfile import LockFile
from ..records import CandidateStatistics, JobRecord, ModelRecord
from ..wire import StoreState
from .damage.damage import Damage, DamageWatch
from .opening import Redo, begin_anew, cannot_be_opened, open_for_reading, open_for_writing, reader
from .reading.queries import Reading
from .rows.measurements import MEASUREMENT, MEASUREMENT_FIELDS, UNKNOWN
from .writing.recording import Recording
from .writing.retention import Retention
from .writing.writer import Writer

__all__ = [
    "MEASUREMENT",
    "MEASUREMENT_FIELDS",
    "UNKNOWN",
    "CandidateStatistics",
    "JobRecord",
    "ModelRecord",
    "Retention",
    "Store",
]


class Store(Reading, Recording):
    """Every measurement, step, decision and model of this node's jobs. Open with `Store.open`."""

    def __init__(
        self,
        path: Path,
        reading: sqlite3.Connection,
        writing: sqlite3.Connection | None,
        lock: LockFile | None,
        damage: Damage | None,
        retention: Retention,
        clock: Callable[[], float],
    ) -> None:
        Reading.__init__(self, path, reading)
        Recording.__init__(self, retention, clock)
        self._damage = damage
        self._lock = lock
        self._writing = writing
        self._file = os.stat(path)
        self._is_replaced = False
        """Whether a new file has replaced the damaged one."""
        self._n_lost_reported = 0
        """Lost rows that `commit` has already reported."""
        self._writer = (
            None if writing is None else Writer(writing, self._series.forget, self._begin_anew, DamageWatch(path))
        )

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        read_only: bool = False,
        retention: Retention | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Store:
        """Open a store and bring its schema up to date; a damaged file is set aside.

        Rows with damaged cells are logged, and not read (`zerotune.store.sqlite.damage.sound_rows`).

        Args:
            path: of the file, which is created if it is missing, unless `read_only`.
            read_only: take no lock and change nothing; another process may write meanwhile.

        Raises:
            StoreError: it cannot be opened, is another application's, or (read-only) is missing or damaged.
            StoreLockedError: another process has it open for writing; names its command and pid.
            StoreVersionError: a newer zerotune wrote it.
        """
        path = Path(os.path.realpath(path))  # SQLite names the log, and we name the lock, by the real path
        retention = retention or Retention()
        if read_only:
            return cls(path, open_for_reading(path), None, None, None, retention, clock)
        writing, lock, damage = open_for_writing(path)
        store = None
        try:
            store = cls(path, reader(path), writing, lock, damage, retention, clock)
            if any(job.started_at_s and job.ended_at_s is None and not job.is_lost for job in store.jobs()):
                # Their daemon has ended; jobs that still train are recorded again when they greet.
                unended = "ended_at_s IS NULL AND started_at_s > 0 AND is_lost = 0"
                store._put(lambda connection: connection.execute(f"UPDATE jobs SET is_lost = 1 WHERE {unended}"))
        except BaseException as error:
            if store is not None:
                store.close()
            else:
                writing.close()
                lock.release()
            if isinstance(error, (sqlite3.Error, MemoryError)):
                raise cannot_be_opened(path, error) from error
            raise
        return store

    @property
    def set_aside(self) -> Path | None:
        """Path of the damaged file that this store replaced when it was opened or while it was open."""
        return None if self._damage is None else self._damage.set_aside

    @property
    def is_read_only(self) -> bool:
        """Whether the store refuses to record."""
        return self._writer is None

    @property
    def n_dropped(self) -> int:
        """Rows lost because the queue was full or SQLite could not write them."""
        return self._writer.n_lost if self._writer else 0

    @property
    def writing(self) -> StoreState:
        """Whether recorded rows can be written, and which were lost."""
        if self._writer is None:
            return StoreState()
        state = msgspec.structs.replace(self._writer.state, is_gone=self._is_gone())
        if (damage := self._damage) is not None:
            state = msgspec.structs.replace(
                state, damage=damage.error, set_aside=str(damage.set_aside),
                n_recovered=damage.n_recovered, n_missing=damage.n_missing,
            )  # fmt: skip
        return state

    @property
    def n_written(self) -> int:
        """Rows committed since opening."""
        return self._writer.n_written if self._writer else 0

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all rows recorded so far are committed; False if that takes too long, or is impossible now."""
        return self._writer.flush(timeout_s) if self._writer else True

    def commit(self, timeout_s: float = 30.0) -> None:
        """Like `flush`, but raises `StoreError` if rows are not committed."""
        is_written = self.flush(timeout_s)
        n_lost, self._n_lost_reported = self.n_dropped - self._n_lost_reported, self.n_dropped
        if not is_written:
            reason = self.writing.error or f"it took longer than {timeout_s:g} s"
            raise StoreError(f"{self.path} cannot be written: {reason}", "make room there, then run this again")
        if n_lost:
            raise StoreError(f"{self.path} did not take {n_lost:,} records: {self.writing.error}", "run this again")

    def close(self) -> None:
        """Write queued rows, close the file, free the lock; may be called twice.

        Rows that cannot be written now are lost, which is logged.
        """
        if self._writer is not None and self._writing is not None:
            self._writer.close()
            for connection in self._connections:
                connection.close()
            self._writing.close()
            self._writing = None
        for connection in self._connections:
            connection.close()
        if self._lock is not None:
            self._lock.release()

    def _begin_anew(self, error: sqlite3.DatabaseError, redo: Redo) -> sqlite3.Connection:
        """Replace the damaged file; the writer's thread calls this."""
        if self._writing is None:
            raise error
        self._writing.close()  # before the new file's log exists, which closing would remove by its name
        self._series.forget()
        self._is_replaced = True
        try:
            self._writing, damage = begin_anew(self.path, error, redo)
            self._n_files += 1
            self._damage = damage  # only after readers open the new file
            self._file = os.stat(self.path)
        finally:
            self._is_replaced = False
        self._series.forget()  # ids of a redo that was rolled back
        return self._writing

    def _is_gone(self) -> bool:
        """Whether others have removed the file from `path`."""
        if self._is_replaced:
            return False
        try:
            return not os.path.samestat(os.stat(self.path), self._file)
        except OSError:
            return True
