"""Reads committed rows; each thread has a connection of its own."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...records import Decision, JobRecord, ModelRecord, Outcome, Source, Stage, StepRecord
from ...records.lateness import Lateness
from ...records.passages import Passages
from ...wire import Facts
from ..damage.sound_rows import EVERY_SERIES
from ..opening import reader
from ..rows import measurements as _measurements
from ..rows.decisions import DECISION_COLUMNS, decision_of
from .measured_calls import MeasuredCalls, measured_calls

Of = TypeVar("Of")


class Reading:
    """The reading methods of a store.

    An argument that is None does not limit what is read. `limit` is the number of the newest rows that are read.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._readers = threading.local()
        self._n_files = 0
        self._readers.connection, self._readers.n_files = connection, 0
        self._connections = [connection]

    def measurements(
        self,
        fabric_id: str | None = None,
        job_id: str | None = None,
        *,
        source: Source | None = None,
        since_s: float | None = None,
        limit: int | None = None,
        chunk_bytes: int | None = 0,
    ) -> NDArray[np.void]:
        """Measurements that match all arguments.

        `chunk_bytes` is the chunk size that a plan named. 0 selects measurements without one, all that most methods
        know.
        """
        conditions: dict[str, Any] = {
            "s.fabric = (SELECT id FROM fabrics WHERE fabric_id = ?)": fabric_id,
            "m.job = (SELECT id FROM jobs WHERE job_id = ?)": job_id,
            "s.source = ?": source,
            "m.measured_at_s >= ?": since_s,
            "s.chunk_bytes = ?": chunk_bytes,
        }
        names = _measurements.MEASUREMENT.names or ()
        return _measurements.select(self._reader(), *_where(conditions), limit, names, EVERY_SERIES)

    def stored(
        self,
        fabric_id: str,
        job_id: str | None = None,
        *,
        without_job: str | None = None,
        outcome: Outcome | None = None,
        limit: int | None = None,
        names: Sequence[str] = _measurements.STORED.names or (),
        any_chunk_size: bool = False,
    ) -> NDArray[np.void]:
        """Measurements on a fabric, with their row ids.

        Args:
            without_job: a job whose measurements are left out.
            names: the fields to read; few are faster.
            any_chunk_size: also read those of which a plan named the chunk size.
        """
        conditions: dict[str, Any] = {
            "s.fabric = (SELECT id FROM fabrics WHERE fabric_id = ?)": fabric_id,
            "m.job = (SELECT id FROM jobs WHERE job_id = ?)": job_id,
            "m.job IS NOT (SELECT id FROM jobs WHERE job_id = ?)": without_job,
            "s.outcome = ?": outcome,
        }
        series = EVERY_SERIES if any_chunk_size else "series"
        return _measurements.select(self._reader(), *_where(conditions), limit, names, series)

    def series(self, fabric_id: str) -> dict[int, dict[str, int]]:
        """The series of a fabric, by `series` of STORED."""
        names = _measurements.SERIES_COLUMNS[1:]
        rows = self._reader().execute(
            f"SELECT id, {','.join(names)} FROM {EVERY_SERIES}"
            " WHERE fabric = (SELECT id FROM fabrics WHERE fabric_id = ?)",
            (fabric_id,),
        )
        return {number: dict(zip(names, values, strict=True)) for number, *values in rows}

    def measured(self) -> dict[tuple[str, str], int]:
        """Number of measurements of each job on each fabric, the oldest job first."""
        rows = self._reader().execute(
            "SELECT j.job_id, f.fabric_id, counted.n_rows FROM"
            f" (SELECT m.job, s.fabric, count(*) AS n_rows FROM measurements m JOIN {EVERY_SERIES} s ON s.id = m.series"
            " GROUP BY m.job, s.fabric) counted"
            " JOIN jobs j ON j.id = counted.job JOIN fabrics f ON f.id = counted.fabric"
            " ORDER BY counted.job, counted.fabric"
        )
        return {(job_id, fabric_id): n_rows for job_id, fabric_id, n_rows in rows}

    def count_measurements(self) -> int:
        """Number of rows of measurements in the file, damaged ones included; this is quick."""
        return int(self._reader().execute("SELECT count(*) FROM main.measurements").fetchone()[0])

    def measured_calls(self, job_id: str) -> MeasuredCalls:
        """Numbers of a job's measured calls and of their steps, including damaged rows."""
        return measured_calls(self._reader(), job_id)

    def steps(self, job_id: str, *, after: int = -1, limit: int | None = None) -> list[StepRecord]:
        """Recorded steps of a job with numbers above `after`, in order."""
        rows = self._reader().execute(
            "SELECT step, epoch, duration_us, exposed_us, memory_pressure FROM steps"
            " WHERE job = (SELECT id FROM jobs WHERE job_id = ?) AND step > ? ORDER BY step DESC LIMIT ?",
            (job_id, after, -1 if limit is None else limit),
        )
        return [StepRecord(*row) for row in rows][::-1]

    def last_steps(self) -> dict[str, int]:
        """The last step of every job that recorded any."""
        rows = self._reader().execute(
            "SELECT job_id, (SELECT max(step) FROM steps WHERE job = jobs.id) AS last FROM jobs WHERE last IS NOT NULL"
        )
        return {job_id: int(last) for job_id, last in rows}

    def highest_epoch(self, job_id: str) -> int | None:
        """The highest epoch of the plans under which a job's steps ran; None: no step is recorded.

        0 means that only NCCL's own choice ran.
        """
        (found,) = self._reader().execute(
            "SELECT max(epoch) FROM steps WHERE job = (SELECT id FROM jobs WHERE job_id = ?)", (job_id,)
        )
        return None if found[0] is None else int(found[0])

    def decisions(
        self,
        job_id: str | None = None,
        fabric_id: str | None = None,
        *,
        limit: int | None = None,
        with_control: bool = True,
    ) -> list[Decision]:
        """Decisions that match all arguments.

        Without `with_control`, control windows are left out, of which long jobs have hundreds.
        """
        where, parameters = _where({"j.job_id = ?": job_id, "f.fabric_id = ?": fabric_id})
        there = self._columns("decisions")
        columns = ("d." + name if name in there else "NULL" for name in DECISION_COLUMNS)
        rows = self._reader().execute(
            f"SELECT j.job_id, f.fabric_id, {','.join(columns)}"
            f" FROM decisions d JOIN jobs j ON j.id = d.job JOIN fabrics f ON f.id = d.fabric"
            f" WHERE ({where}) AND (? OR d.kind != 'control') ORDER BY d.id DESC LIMIT ?",
            (*parameters, with_control, -1 if limit is None else limit),
        )
        return [decision_of(row) for row in rows][::-1]

    def newest_decision(self, job_id: str) -> int:
        """Row id of a job's newest decision, which grows with each decision; 0: none. This is quick."""
        (found,) = self._reader().execute(
            "SELECT coalesce(max(id), 0) FROM decisions WHERE job = (SELECT id FROM jobs WHERE job_id = ?)", (job_id,)
        )
        return int(found[0])

    def fabrics(self) -> dict[str, dict[str, str | int | float | bool]]:
        """Description of every fabric, by fabric_id; empty if no job can have sent it."""
        rows = self._reader().execute("SELECT fabric_id, description FROM fabrics ORDER BY id")
        return {fabric_id: _read(description, {}, Facts) for fabric_id, description in rows}

    def jobs(self) -> list[JobRecord]:
        """Every job, oldest first."""
        columns = self._columns("jobs")
        newer = "name, is_lost" if "name" in columns else "'', 0"
        newer += ", passages" if "passages" in columns else ", '{}'"
        newer += ", lateness" if "lateness" in columns else ", '{}'"
        newer += ", failure" if "failure" in columns else ", ''"
        newer += ", training, environment" if "environment" in columns else ", '', ''"
        rows = self._reader().execute(
            f"SELECT job_id, coalesce(fabric_id, ''), n_ranks, stage, started_at_s, ended_at_s, {newer}"
            " FROM jobs LEFT JOIN fabrics ON fabrics.id = jobs.fabric ORDER BY jobs.id"
        )
        return [
            JobRecord(
                job, fabric, n, Stage(stage), start, end, name, bool(is_lost),
                _read(seen, Passages()), _read(late, Lateness()), *texts,
            )
            for job, fabric, n, stage, start, end, name, is_lost, seen, late, *texts in rows
        ]

    def shapes(self) -> dict[str, set[tuple[int, int, int, int]]]:
        """The collectives that each job measured, as (n_ranks, n_nodes, collective, message_bytes)."""
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
        """The distinct (collective, n_ranks, message_bytes, protocol) that a job measured."""
        return self._reader().execute(
            "SELECT DISTINCT s.collective, s.n_ranks, s.message_bytes, s.protocol FROM series s WHERE s.id IN"
            " (SELECT DISTINCT series FROM measurements WHERE job = (SELECT id FROM jobs WHERE job_id = ?))",
            (job_id,),
        ).fetchall()

    def load_model(self, name: str, fabric_id: str) -> ModelRecord | None:
        """The saved model of this name for this fabric, if any."""
        found = [one for one in self.models() if (one.name, one.fabric_id) == (name, fabric_id)]
        return found[0] if found else None

    def models(self) -> list[ModelRecord]:
        """Every saved model; a damaged one has only its name and fabric, see `ModelRecord.is_damaged`."""
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

    def _columns(self, table: str) -> set[str]:
        """A table's columns; an older store that is only read may lack new ones."""
        return {name for _, name, *_ in self._reader().execute(f"PRAGMA table_info({table})")}

    def _reader(self) -> sqlite3.Connection:
        """This thread's reading connection."""
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


def _read(text: str, otherwise: Of, kind: Any = None) -> Of:
    """A cell decoded as `kind` (default: the type of `otherwise`); `otherwise` if it cannot be decoded."""
    try:
        found: Of = msgspec.json.decode(text, type=kind or type(otherwise))
    except msgspec.MsgspecError:
        return otherwise
    return found
