"""Queues jobs, measurements, steps, decisions and models for writing; nothing here waits for the disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...errors import StoreError
from ...records import Decision, ModelRecord, StepRecord
from ..rows import measurements as _measurements
from ..rows.decisions import DECISION_COLUMNS, decision_values
from .job_news import JobNews
from .retention import Retention, retain
from .writer import Writer

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's own from Python 3.11 on

ROW_BYTES: Final = 128
"""The queue and the kept operations are bounded in rows; a long description counts as one row per so many bytes."""


class Recording:
    """The writing methods of a store; they queue, and never block."""

    path: Path
    _writer: Writer | None

    def __init__(self, retention: Retention, clock: Callable[[], float]) -> None:
        self.n_invalid = 0
        """Measurements refused because a field held an impossible value."""
        self._clock = clock
        self._retention = retention
        self._rows_until_retention = 0
        self._series = _measurements.SeriesIds()

    def record_job(
        self, job_id: str, fabric_id: str, fabric: dict[str, str | int | float | bool], n_ranks: int, name: str = ""
    ) -> None:
        """Queue the start of a job on a fabric; a job that was recorded before counts as running again.

        If `fabric` (the hardware's description) or `name` is empty, the known one stays.
        """
        now_s, description = self._clock(), msgspec.json.encode(fabric).decode() if fabric else ""

        def write(connection: sqlite3.Connection) -> None:
            row = _fabric_row(connection, fabric_id)
            if description:
                connection.execute("UPDATE fabrics SET description = ? WHERE id = ?", (description, row))
            connection.execute(
                "UPDATE jobs SET n_ranks = ?, ended_at_s = NULL, is_lost = 0, failure = '',"
                " name = CASE ? WHEN '' THEN name ELSE ? END,"
                " started_at_s = CASE started_at_s WHEN 0 THEN ? ELSE started_at_s END WHERE id = ?",
                (n_ranks, name, name, now_s, _job_row(connection, job_id, row)),
            )

        self._put(write, is_essential=True, room=1 + len(description) // ROW_BYTES)

    def record_start(self, job_id: str, name: str, training: str, environment: str) -> None:
        """Queue that a job is about to start; `record_job` follows if a rank greets."""
        now_s = self._clock()

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE jobs SET name = ?, training = ?, environment = ?, started_at_s = ? WHERE id = ?",
                (name, training, environment, now_s, _job_row(connection, job_id, None)),
            )

        self._put(write, is_essential=True)

    def update_job(self, job_id: str, **news: Unpack[JobNews]) -> None:
        """Queue news of a job; nothing happens if the job was never recorded."""
        known: dict[str, Any] = {name: value for name, value in news.items() if value is not None}
        for name in ("passages", "lateness"):
            if name in known:
                known[name] = msgspec.json.encode(known[name]).decode()
        if known:
            columns = ", ".join(f"{name} = ?" for name in known)
            self._put(
                lambda connection: connection.execute(
                    f"UPDATE jobs SET {columns} WHERE job_id = ?", (*known.values(), job_id)
                ),
                is_essential=True,
            )

    def record_measurements(self, fabric_id: str, job_id: str, block: NDArray[np.void]) -> None:
        """Queue a copy of measurements; malformed rows and those that a full queue refuses are counted."""
        good = _measurements.well_formed(block)
        if not good.all():
            self.n_invalid += int(len(block) - good.sum())
            block = block[good]
        if not len(block):
            return
        block, now_s = block.copy(), int(self._clock())

        def write(connection: sqlite3.Connection) -> None:
            fabric = _fabric_row(connection, fabric_id)
            series = self._series.of_block(connection, fabric, block)
            _measurements.insert(connection, series, _job_row(connection, job_id, fabric), block, now_s)
            self._rows_until_retention -= len(block)
            if self._rows_until_retention < 0:
                self._rows_until_retention = self._retention.every_rows
                retain(connection, self._retention)

        self._put(write, len(block))

    def record_steps(self, job_id: str, steps: Sequence[StepRecord]) -> None:
        """Queue finished steps; a step recorded twice keeps the newer values."""
        rows = [(s.step, s.epoch, s.duration_us, s.exposed_us, s.memory_pressure) for s in steps]

        def write(connection: sqlite3.Connection) -> None:
            job = _job_row(connection, job_id, None)
            connection.executemany(
                "INSERT OR REPLACE INTO steps (job, step, epoch, duration_us, exposed_us, memory_pressure)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                [(job, *row) for row in rows],
            )

        self._put(write, len(rows))

    def record_decisions(self, decisions: Sequence[Decision]) -> None:
        """Queue decisions."""
        decisions = list(decisions)

        def write(connection: sqlite3.Connection) -> None:
            for decision in decisions:
                fabric = _fabric_row(connection, decision.fabric_id)
                values = (_job_row(connection, decision.job_id, fabric), fabric, *decision_values(decision))
                columns = ",".join(("job", "fabric", *DECISION_COLUMNS))
                marks = ",".join("?" * len(values))
                connection.execute(f"INSERT INTO decisions ({columns}) VALUES ({marks})", values)

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

    def rename_model(self, name: str, fabric_id: str, new_name: str) -> None:
        """Queue the renaming of a model; its cells stay as they are, even damaged ones.

        A model of this fabric that has the new name is replaced.
        """
        self._put(
            lambda connection: connection.execute(
                "UPDATE OR REPLACE models SET name = ? WHERE name = ? AND fabric_id = ?", (new_name, name, fabric_id)
            ),
            is_essential=True,
        )

    def _put(
        self,
        operation: Callable[[sqlite3.Connection], object],
        n_rows: int = 1,
        *,
        is_essential: bool = False,
        room: int = 0,
    ) -> None:
        if self._writer is None:
            raise StoreError(f"store {self.path} is open for reading only", "open it for writing")

        def write(connection: sqlite3.Connection) -> None:
            operation(connection)

        self._writer.put(write, n_rows, is_essential=is_essential, room=room)


def _fabric_row(connection: sqlite3.Connection, fabric_id: str) -> int:
    """Id of the fabric's row; a missing row is inserted."""
    connection.execute("INSERT OR IGNORE INTO fabrics (fabric_id) VALUES (?)", (fabric_id,))
    return int(connection.execute("SELECT id FROM fabrics WHERE fabric_id = ?", (fabric_id,)).fetchone()[0])


def _job_row(connection: sqlite3.Connection, job_id: str, fabric: int | None) -> int:
    """Id of a job's row; a missing row is inserted. `fabric` becomes the job's fabric; None keeps the known one."""
    connection.execute("INSERT OR IGNORE INTO jobs (job_id) VALUES (?)", (job_id,))
    if fabric is not None:
        change = "UPDATE jobs SET fabric = ? WHERE job_id = ? AND fabric IS NOT ?"
        connection.execute(change, (fabric, job_id, fabric))
    return int(connection.execute("SELECT id FROM jobs WHERE job_id = ?", (job_id,)).fetchone()[0])
