"""The store: one SQLite file, many readers, one writer thread.

`record_*`, `update_job` and `save_model` only queue and never block; reads see what is committed
(call `flush` first to read what you just wrote). Rows beyond the queue's limit (500,000) are dropped and counted, so
bulk importers call `flush` between blocks. While the disk is full, rows wait in that queue.
Times are seconds since the epoch.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from zerotune.store.errors import StoreError
from zerotune.store.lateness import Lateness
from zerotune.store.passages import Passages
from zerotune.store.records import CandidateStatistics, Decision, JobRecord, ModelRecord, Source, Stage, StepRecord
from zerotune.store.sqlite import measurements as _measurements
from zerotune.store.sqlite.damage import Damage, DamageWatch
from zerotune.store.sqlite.measured_calls import MeasuredCalls, measured_calls
from zerotune.store.sqlite.measurements import MEASUREMENT, MEASUREMENT_FIELDS, UNKNOWN
from zerotune.store.sqlite.opening import (
    Redo,
    WriterLock,
    begin_anew,
    cannot_be_opened,
    open_for_reading,
    open_for_writing,
    reader,
)
from zerotune.store.sqlite.retention import Retention, retain
from zerotune.store.sqlite.row_checksums import row_checksum
from zerotune.store.sqlite.rows import DECISION_COLUMNS, decision_of, decision_values, fabric_row, job_row
from zerotune.store.sqlite.writer import Writer
from zerotune.store.wire import StoreState

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

Of = TypeVar("Of", Passages, Lateness)


class Store:
    """Every measurement, step, decision and model of this node's jobs. Open with `Store.open`."""

    def __init__(
        self,
        path: Path,
        reading: sqlite3.Connection,
        writing: sqlite3.Connection | None,
        lock: WriterLock | None,
        damage: Damage | None,
        retention: Retention,
        clock: Callable[[], float],
    ) -> None:
        self.path = path
        self._damage = damage
        self.n_invalid = 0
        """Measurements refused because a field held a value no record allows."""
        self._lock = lock
        self._clock = clock
        self._retention = retention
        self._readers = threading.local()
        self._n_files = 0
        self._readers.connection, self._readers.n_files = reading, 0
        self._connections = [reading]
        self._writing = writing
        self._file = os.stat(path)
        self._is_replaced = False
        """By a new file, as it was damaged."""
        self._series = _measurements.SeriesIds()
        self._rows_until_retention = 0
        self._n_lost_told = 0
        """Rows whose loss `commit` has told of."""
        self._writer = (
            None if writing is None else Writer(writing, self._series.forget, self._begin_anew, DamageWatch(path))
        )

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        read_only: bool = False,
        may_set_aside: bool = True,
        retention: Retention | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Store:
        """Open a store and bring its schema up to date; a damaged file is set aside, if allowed.

        Rows with damaged cells are logged, and not read (`zerotune.store.sqlite.sound_rows`).

        Args:
            path: of the file, which is created if it is missing, unless `read_only`.
            read_only: take no lock and change nothing; another process may write meanwhile.
            may_set_aside: move a damaged file to another name and begin a new one; otherwise it is an error.
            retention: how much is kept; None: the defaults of `Retention`.
            clock: seconds since the epoch (Unix time); tests pass their own.

        Returns:
            The open store; close it, or use it in a `with` statement.

        Raises:
            StoreError: it cannot be opened, is another application's, or (read-only) is missing; or it is damaged and
                may not be set aside.
            StoreLockedError: another process has it open for writing; names its command and pid.
            StoreVersionError: a newer zerotune wrote it.
        """
        path = Path(os.path.realpath(path))  # as SQLite names the log, and each user of a link the lock
        retention = retention or Retention()
        if read_only:
            return cls(path, open_for_reading(path), None, None, None, retention, clock)
        writing, lock, damage = open_for_writing(path, may_set_aside=may_set_aside)
        store = None
        try:
            store = cls(path, reader(path), writing, lock, damage, retention, clock)
            if any(job.started_at_s and job.ended_at_s is None and not job.is_lost for job in store.jobs()):
                # Whoever recorded them is gone; those that train on are recorded anew when they greet.
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
        """Where the damaged file is that stood at `path` until this store was opened, or while it was open."""
        return None if self._damage is None else self._damage.set_aside

    @property
    def is_read_only(self) -> bool:
        """Whether nothing can be recorded here."""
        return self._writer is None

    @property
    def n_dropped(self) -> int:
        """Rows lost because the queue was full or SQLite could not write them."""
        return self._writer.n_lost if self._writer else 0

    @property
    def writing(self) -> StoreState:
        """Whether what is recorded can be written, and what was lost."""
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
        """Wait until what was recorded so far is committed; False when that took too long, or cannot be now."""
        return self._writer.flush(timeout_s) if self._writer else True

    def commit(self, timeout_s: float = 30.0) -> None:
        """`flush` for callers whose work is lost without it.

        Raises:
            StoreError: what was recorded is not committed.
        """
        is_written = self.flush(timeout_s)
        n_lost, self._n_lost_told = self.n_dropped - self._n_lost_told, self.n_dropped
        if not is_written:
            reason = self.writing.error or f"it took longer than {timeout_s:g} s"
            raise StoreError(f"{self.path} cannot be written: {reason}", "make room there, then run this again")
        if n_lost:
            raise StoreError(f"{self.path} did not take {n_lost:,} records: {self.writing.error}", "run this again")

    def close(self) -> None:
        """Write what is queued, close the file, free the lock; may be called twice.

        What cannot be written now is lost, and logged.
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

    # -- recording ----------------------------------------------------------------------------

    def record_job(
        self, job_id: str, fabric_id: str, fabric: dict[str, str | int | float | bool], n_ranks: int, name: str = ""
    ) -> None:
        """Queue the start of a job on a fabric; a job that was recorded before counts as running again.

        Args:
            job_id: what tells it from all others.
            fabric_id: of the hardware that it runs on.
            fabric: what that hardware is; empty leaves what is known.
            n_ranks: ranks that it has.
            name: what people call it; empty leaves what is known.
        """
        now_s, description = self._clock(), msgspec.json.encode(fabric).decode()

        def write(connection: sqlite3.Connection) -> None:
            row = fabric_row(connection, fabric_id)
            if fabric:
                connection.execute("UPDATE fabrics SET description = ? WHERE id = ?", (description, row))
            connection.execute(
                "UPDATE jobs SET n_ranks = ?, ended_at_s = NULL, is_lost = 0, failure = '',"
                " name = CASE ? WHEN '' THEN name ELSE ? END,"
                " started_at_s = CASE started_at_s WHEN 0 THEN ? ELSE started_at_s END WHERE id = ?",
                (n_ranks, name, name, now_s, job_row(connection, job_id, row)),
            )

        self._put(write, is_essential=True)

    def update_job(
        self,
        job_id: str,
        *,
        stage: Stage | None = None,
        ended_at_s: float | None = None,
        is_lost: bool | None = None,
        failure: str | None = None,
        name: str | None = None,
        passages: Passages | None = None,
        lateness: Lateness | None = None,
    ) -> None:
        """Queue what became known of a job; None leaves a field as it is.

        Nothing happens if the job was never recorded.

        Args:
            job_id: which one.
            stage: the kind of training that it was recognised as.
            ended_at_s: when its last rank left or was heard, in seconds since the epoch.
            is_lost: whether one of its ranks fell silent.
            failure: the rank whose script an exception ended, and which.
            name: what people call it.
            passages: what passed the tuner by in it.
            lateness: which of its ranks collectives wait for.
        """
        seen = None if passages is None else msgspec.json.encode(passages).decode()
        late = None if lateness is None else msgspec.json.encode(lateness).decode()
        self._put(
            lambda connection: connection.execute(
                "UPDATE jobs SET stage = coalesce(?, stage), ended_at_s = coalesce(?, ended_at_s),"
                " is_lost = coalesce(?, is_lost), name = coalesce(?, name), passages = coalesce(?, passages),"
                " lateness = coalesce(?, lateness), failure = coalesce(?, failure) WHERE job_id = ?",
                (stage, ended_at_s, is_lost, name, seen, late, failure, job_id),
            ),
            is_essential=True,
        )

    def record_measurements(self, fabric_id: str, job_id: str, block: NDArray[np.void]) -> None:
        """Queue measurements; malformed rows and those that a full queue refuses are counted.

        Args:
            fabric_id: the fabric that they were measured on.
            job_id: the job that measured them.
            block: MEASUREMENT, shape (n,); copied.
        """
        good = _measurements.well_formed(block)
        if not good.all():
            self.n_invalid += int(len(block) - good.sum())
            block = block[good]
        if not len(block):
            return
        block, now_s = block.copy(), int(self._clock())

        def write(connection: sqlite3.Connection) -> None:
            fabric = fabric_row(connection, fabric_id)
            series = self._series.of_block(connection, fabric, block)
            _measurements.insert(connection, series, job_row(connection, job_id, fabric), block, now_s)
            self._rows_until_retention -= len(block)
            if self._rows_until_retention < 0:
                self._rows_until_retention = self._retention.every_rows
                retain(connection, self._retention)

        self._put(write, len(block))

    def record_steps(self, job_id: str, steps: Sequence[StepRecord]) -> None:
        """Queue finished steps; a step recorded twice keeps the newer values."""
        rows = [(s.step, s.epoch, s.duration_us, s.exposed_us, s.memory_pressure) for s in steps]

        def write(connection: sqlite3.Connection) -> None:
            job = job_row(connection, job_id, None)
            connection.executemany(
                "INSERT OR REPLACE INTO steps (job, step, epoch, duration_us, exposed_us, memory_pressure, checksum)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(job, *row, row_checksum((job, *row))) for row in rows],
            )

        self._put(write, len(rows))

    def record_decisions(self, decisions: Sequence[Decision]) -> None:
        """Queue decisions."""
        decisions = list(decisions)

        def write(connection: sqlite3.Connection) -> None:
            for decision in decisions:
                fabric = fabric_row(connection, decision.fabric_id)
                values = (job_row(connection, decision.job_id, fabric), fabric, *decision_values(decision))
                columns = ",".join(("job", "fabric", *DECISION_COLUMNS, "checksum"))
                marks = ",".join("?" * (len(values) + 1))
                row = (*values, row_checksum(values))
                connection.execute(f"INSERT INTO decisions ({columns}) VALUES ({marks})", row)

        self._put(write, len(decisions), is_essential=True)

    def save_model(self, model: ModelRecord) -> None:
        """Queue a model; it replaces the one of the same name and fabric."""
        values = (
            model.name, model.fabric_id, model.blob, msgspec.json.encode(model.versions).decode(),
            model.training_hash, model.error, model.created_at_s,
        )  # fmt: skip
        self._put(
            lambda connection: connection.execute(
                "INSERT OR REPLACE INTO models"
                " (name, fabric_id, blob, versions, training_hash, error, created_at_s)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                values,
            ),
            is_essential=True,
        )

    # -- reading ------------------------------------------------------------------------------

    def measurements(
        self,
        fabric_id: str | None = None,
        job_id: str | None = None,
        *,
        source: Source | None = None,
        since_s: float | None = None,
        limit: int | None = None,
    ) -> NDArray[np.void]:
        """Measurements that match all that is given.

        Args:
            fabric_id: None: of any fabric.
            job_id: None: of any job.
            source: live, sweep or imported; None: any.
            since_s: those recorded at this Unix time or later; None: of any age.
            limit: the newest so many; None: all.

        Returns:
            MEASUREMENT, shape (n,), oldest first.
        """
        conditions: dict[str, Any] = {
            "s.fabric = (SELECT id FROM fabrics WHERE fabric_id = ?)": fabric_id,
            "m.job = (SELECT id FROM jobs WHERE job_id = ?)": job_id,
            "s.source = ?": source,
            "m.measured_at_s >= ?": since_s,
        }
        where, parameters = _where(conditions)
        return _measurements.select(self._reader(), where, parameters, limit)

    def measurements_at_usual_level(
        self, fabric_id: str, *, limit: int | None = None, without_job: str | None = None
    ) -> NDArray[np.void]:
        """Measurements with durations as they would have been at the network's usual speed.

        So a setting that ran while the network was slow does not look slower than the others.

        Args:
            fabric_id: the fabric that they were measured on.
            limit: the newest so many; None: all.
            without_job: leave this job's out; None: take all jobs.

        Returns:
            MEASUREMENT, shape (n,), oldest first.
        """
        conditions = {
            "s.fabric = (SELECT id FROM fabrics WHERE fabric_id = ?)": fabric_id,
            "m.job IS NOT (SELECT id FROM jobs WHERE job_id = ?)": without_job,
        }
        where, parameters = _where(conditions)
        return _measurements.select_at_usual_level(self._reader(), where, parameters, limit)

    def measured(self) -> dict[tuple[str, str], int]:
        """How many measurements there are of each job on each fabric, the jobs oldest first."""
        rows = self._reader().execute(
            "SELECT j.job_id, f.fabric_id, counted.n_rows FROM"
            " (SELECT m.job, s.fabric, count(*) AS n_rows FROM measurements m JOIN series s ON s.id = m.series"
            " GROUP BY m.job, s.fabric) counted"
            " JOIN jobs j ON j.id = counted.job JOIN fabrics f ON f.id = counted.fabric"
            " ORDER BY counted.job, counted.fabric"
        )
        return {(job_id, fabric_id): n_rows for job_id, fabric_id, n_rows in rows}

    def statistics(
        self, fabric_id: str, job_id: str | None = None, *, without_job: str | None = None
    ) -> list[CandidateStatistics]:
        """Count, median, mean, spread and minimum of the successful measurements on a fabric.

        Where the network was slower for a time, durations count as they would have been at its usual speed. It takes
        two to three seconds per million rows kept, most of that outside the GIL.

        Args:
            fabric_id: the fabric that they were measured on.
            job_id: of this job only; None: of all jobs.
            without_job: leave this job's out; None: leave none out.

        Returns:
            One entry per (key, candidate, chosen by NCCL or not), sorted by key.
        """
        return _measurements.statistics(self._reader(), fabric_id, job_id, without_job)

    def steps(self, job_id: str, *, after: int = -1, limit: int | None = None) -> list[StepRecord]:
        """Recorded steps of a job, in order.

        Args:
            job_id: whose.
            after: only steps with higher numbers.
            limit: the newest so many; None: all.

        Returns:
            One record per step.
        """
        rows = self._reader().execute(
            "SELECT step, epoch, duration_us, exposed_us, memory_pressure FROM steps"
            " WHERE job = (SELECT id FROM jobs WHERE job_id = ?) AND step > ? ORDER BY step DESC LIMIT ?",
            (job_id, after, -1 if limit is None else limit),
        )
        return [StepRecord(*row) for row in rows][::-1]

    def count_measurements(self) -> int:
        """How many rows of measurements the file has, damaged ones included: quick."""
        return int(self._reader().execute("SELECT count(*) FROM main.measurements").fetchone()[0])

    def last_steps(self) -> dict[str, int]:
        """The last step of every job that recorded any."""
        rows = self._reader().execute(
            "SELECT job_id, (SELECT max(step) FROM steps WHERE job = jobs.id) AS last FROM jobs WHERE last IS NOT NULL"
        )
        return {job_id: int(last) for job_id, last in rows}

    def highest_epoch(self, job_id: str) -> int | None:
        """The highest epoch of the plans that steps of a job ran under; 0: NCCL's own choice ran.

        None: no step is recorded.
        """
        (found,) = self._reader().execute(
            "SELECT max(epoch) FROM steps WHERE job = (SELECT id FROM jobs WHERE job_id = ?)", (job_id,)
        )
        return None if found[0] is None else int(found[0])

    def measured_calls(self, job_id: str) -> MeasuredCalls:
        """How many calls of a job were measured, and in how many steps; damaged rows were calls, too."""
        return measured_calls(self._reader(), job_id)

    def decisions(
        self, job_id: str | None = None, fabric_id: str | None = None, *, limit: int | None = None
    ) -> list[Decision]:
        """Decisions that match all that is given.

        Args:
            job_id: None: of any job.
            fabric_id: None: on any fabric.
            limit: the newest so many; None: all.

        Returns:
            Decisions, oldest first.
        """
        where, parameters = _where({"j.job_id = ?": job_id, "f.fabric_id = ?": fabric_id})
        there = self._columns("decisions")
        columns = ("d." + name if name in there else "NULL" for name in DECISION_COLUMNS)
        rows = self._reader().execute(
            f"SELECT j.job_id, f.fabric_id, {','.join(columns)}"
            f" FROM decisions d JOIN jobs j ON j.id = d.job JOIN fabrics f ON f.id = d.fabric"
            f" WHERE {where} ORDER BY d.id DESC LIMIT ?",
            (*parameters, -1 if limit is None else limit),
        )
        return [decision_of(row) for row in rows][::-1]

    def newest_decision(self, job_id: str) -> int:
        """Row of a job's newest decision, which grows with every one; 0: there is none. It costs next to nothing."""
        (found,) = self._reader().execute(
            "SELECT coalesce(max(id), 0) FROM decisions WHERE job = (SELECT id FROM jobs WHERE job_id = ?)", (job_id,)
        )
        return int(found[0])

    def fabrics(self) -> dict[str, dict[str, str | int | float | bool]]:
        """Description of every fabric, by fabric_id."""
        rows = self._reader().execute("SELECT fabric_id, description FROM fabrics ORDER BY id")
        return {fabric_id: msgspec.json.decode(description) for fabric_id, description in rows}

    def jobs(self) -> list[JobRecord]:
        """Every job, oldest first."""
        columns = self._columns("jobs")
        newer = "name, is_lost" if "name" in columns else "'', 0"
        newer += ", passages" if "passages" in columns else ", '{}'"
        newer += ", lateness" if "lateness" in columns else ", '{}'"
        newer += ", failure" if "failure" in columns else ", ''"
        rows = self._reader().execute(
            f"SELECT job_id, coalesce(fabric_id, ''), n_ranks, stage, started_at_s, ended_at_s, {newer}"
            " FROM jobs LEFT JOIN fabrics ON fabrics.id = jobs.fabric ORDER BY jobs.id"
        )
        return [
            JobRecord(
                job, fabric, n, Stage(stage), start, end, name, bool(is_lost),
                _read(seen, Passages), _read(late, Lateness), failure,
            )
            for job, fabric, n, stage, start, end, name, is_lost, seen, late, failure in rows
        ]

    def shapes(self) -> dict[str, set[tuple[int, int, int, int]]]:
        """What each job measured, as (n_ranks, n_nodes, collective, message_bytes)."""
        rows = self._reader().execute(
            "SELECT DISTINCT j.job_id, s.n_ranks, s.n_nodes, s.collective, s.message_bytes"
            " FROM (SELECT DISTINCT job, series FROM measurements) m"
            " JOIN series s ON s.id = m.series JOIN jobs j ON j.id = m.job"
        )
        found: dict[str, set[tuple[int, int, int, int]]] = {}
        for job_id, *shape in rows:
            found.setdefault(job_id, set()).add((shape[0], shape[1], shape[2], shape[3]))
        return found

    def ran(self, job_id: str) -> list[tuple[int, int, int, int]]:
        """What a job measured, as (collective, n_ranks, message_bytes, protocol), each once."""
        return self._reader().execute(
            "SELECT DISTINCT s.collective, s.n_ranks, s.message_bytes, s.protocol FROM series s WHERE s.id IN"
            " (SELECT DISTINCT series FROM measurements WHERE job = (SELECT id FROM jobs WHERE job_id = ?))",
            (job_id,),
        ).fetchall()

    def delete_model(self, name: str, fabric_id: str) -> None:
        """Queue the deletion of a model, if there is one of that name for that fabric."""
        self._put(
            lambda connection: connection.execute(
                "DELETE FROM models WHERE name = ? AND fabric_id = ?", (name, fabric_id)
            ),
            is_essential=True,
        )

    def rename_model(self, name: str, fabric_id: str, new_name: str) -> None:
        """Queue the renaming of a model; its cells stay as they are, even damaged ones.

        Args:
            name: its name so far.
            fabric_id: of the fabric that it was trained for.
            new_name: a model of this fabric that has this name is replaced.
        """
        self._put(
            lambda connection: connection.execute(
                "UPDATE OR REPLACE models SET name = ? WHERE name = ? AND fabric_id = ?", (new_name, name, fabric_id)
            ),
            is_essential=True,
        )

    def load_model(self, name: str, fabric_id: str) -> ModelRecord | None:
        """The saved model of that name for that fabric, if any."""
        found = [one for one in self.models() if (one.name, one.fabric_id) == (name, fabric_id)]
        return found[0] if found else None

    def models(self) -> list[ModelRecord]:
        """Every saved model; of one with a damaged cell only the name and the fabric, see `ModelRecord.is_damaged`."""
        rows = self._reader().execute(
            "SELECT is_sound, name, fabric_id, blob, versions, training_hash, error, created_at_s FROM models"
            " ORDER BY name, fabric_id"
        )
        return [
            ModelRecord(name, fabric_id, blob, msgspec.json.decode(versions), training_hash, error, created_at_s)
            if is_sound
            else ModelRecord(name, fabric_id, b"", {}, "", None, 0.0, is_damaged=True)
            for is_sound, name, fabric_id, blob, versions, training_hash, error, created_at_s in rows
        ]

    # -- inside -------------------------------------------------------------------------------

    def _put(
        self, operation: Callable[[sqlite3.Connection], object], n_rows: int = 1, *, is_essential: bool = False
    ) -> None:
        if self._writer is None:
            raise StoreError(f"store {self.path} is open for reading only", "open it for writing")

        def write(connection: sqlite3.Connection) -> None:
            operation(connection)

        self._writer.put(write, n_rows, is_essential=is_essential)

    def _begin_anew(self, error: sqlite3.DatabaseError, redo: Redo) -> sqlite3.Connection:
        """Called by the writer's thread when the file proves to be damaged."""
        if self._writing is None or self._lock is None:
            raise error
        self._writing.close()  # before the new file's log is there, which closing would remove by its name
        self._series.forget()
        self._is_replaced = True
        try:
            self._writing, damage = begin_anew(self.path, error, self._lock, redo)
            self._n_files += 1
            self._damage = damage  # no sooner than readers open the new file
            self._file = os.stat(self.path)
        finally:
            self._is_replaced = False
        self._series.forget()  # of a redo that was undone
        return self._writing

    def _columns(self, table: str) -> set[str]:
        """What a table has: an older store that is only read may lack the newest."""
        return {name for _, name, *_ in self._reader().execute(f"PRAGMA table_info({table})")}

    def _is_gone(self) -> bool:
        """Whether the file that is written was removed from `path`, by others than this process."""
        if self._is_replaced:
            return False
        try:
            return not os.path.samestat(os.stat(self.path), self._file)
        except OSError:
            return True

    def _reader(self) -> sqlite3.Connection:
        """This thread's reading connection; SQLite allows any number of them."""
        connection: sqlite3.Connection | None = getattr(self._readers, "connection", None)
        if connection is None or self._readers.n_files != self._n_files:
            n_files = self._n_files
            connection = self._readers.connection = reader(self.path)
            self._readers.n_files = n_files
            self._connections.append(connection)
        return connection


def _where(conditions: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
    given = {clause: value for clause, value in conditions.items() if value is not None}
    return " AND ".join(given) or "1", tuple(given.values())


def _read(text: str, kind: type[Of]) -> Of:
    """What a job's row says of it; nothing where that cannot be read."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError:
        return kind()
