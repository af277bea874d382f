"""Rows that other rows refer to, and decisions as rows."""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from zerotune.store.records import Collective, CommunicatorClass, Decision, DecisionKey, Phase
from zerotune.store.sqlite.rows.measurements import candidate_of
from zerotune.store.sqlite.rows.sealing import row_checksum, seal

FABRIC_COLUMNS: Final = ("fabric_id", "description")
JOB_COLUMNS: Final = (
    "job_id", "fabric", "n_ranks", "stage", "started_at_s", "ended_at_s", "name", "is_lost", "passages", "lateness",
    "failure",
)  # fmt: skip
DECISION_COLUMNS: Final = (
    "n_ranks", "n_nodes", "collective", "phase", "size_class", "algorithm", "protocol", "n_channels",
    "epoch", "kind", "reason", "predicted_us", "predicted_low_us", "predicted_high_us", "baseline_us",
    "n_measurements", "model_id", "decided_at_s", "alternatives", "step",
)  # fmt: skip


def fabric_row(connection: sqlite3.Connection, fabric_id: str) -> int:
    """Id of the fabric's row, which is inserted if it is missing."""
    new = (fabric_id, "{}")
    connection.execute(
        "INSERT OR IGNORE INTO fabrics (fabric_id, description, checksum) VALUES (?, ?, ?)", (*new, row_checksum(new))
    )
    return int(connection.execute("SELECT id FROM fabrics WHERE fabric_id = ?", (fabric_id,)).fetchone()[0])


def describe_fabric(connection: sqlite3.Connection, row: int, fabric_id: str, description: str) -> None:
    """Write what a fabric is.

    Args:
        connection: in a transaction that writes.
        row: id of the fabric's row.
        fabric_id: its name there.
        description: as JSON.
    """
    checksum = row_checksum((fabric_id, description))
    connection.execute("UPDATE fabrics SET description = ?, checksum = ? WHERE id = ?", (description, checksum, row))


def job_row(connection: sqlite3.Connection, job_id: str, fabric: int | None) -> int:
    """Id of a job's row, which is inserted if it is missing.

    Args:
        connection: in a transaction that writes.
        job_id: the job's name.
        fabric: id of the fabric's row, which becomes the job's fabric; None leaves that as it is.

    Returns:
        Id of the job's row.
    """
    n_changed = connection.execute("INSERT OR IGNORE INTO jobs (job_id) VALUES (?)", (job_id,)).rowcount
    if fabric is not None:
        change = "UPDATE jobs SET fabric = ? WHERE job_id = ? AND fabric IS NOT ?"
        n_changed += connection.execute(change, (fabric, job_id, fabric)).rowcount
    row = int(connection.execute("SELECT id FROM jobs WHERE job_id = ?", (job_id,)).fetchone()[0])
    if n_changed:
        seal(connection, "jobs", JOB_COLUMNS, [row])
    return row


def change_jobs(connection: sqlite3.Connection, change: str, where: str, values: tuple[Any, ...] = ()) -> None:
    """Change columns of jobs.

    Args:
        connection: in a transaction that writes.
        change: SQL, what follows SET; its values come first.
        where: SQL, which jobs; that may change what it says of them.
        values: of the question marks of both.
    """
    of_where = values[len(values) - where.count("?") :]
    ids = [row for (row,) in connection.execute(f"SELECT id FROM jobs WHERE {where}", of_where)]
    connection.execute(f"UPDATE jobs SET {change} WHERE {where}", values)
    seal(connection, "jobs", JOB_COLUMNS, ids)


def decision_values(decision: Decision) -> tuple[Any, ...]:
    """The values of DECISION_COLUMNS."""
    key, candidate = decision.key, decision.candidate
    return (
        key.communicator.n_ranks, key.communicator.n_nodes, key.collective, key.phase, key.size_class,
        candidate.algorithm, candidate.protocol, candidate.n_channels,
        *(getattr(decision, name) for name in DECISION_COLUMNS[8:]),
    )  # fmt: skip


def decision_of(row: tuple[Any, ...]) -> Decision:
    """The decision in job_id, fabric_id and DECISION_COLUMNS."""
    job_id, fabric_id, n_ranks, n_nodes, collective, phase, size_class = row[:7]
    key = DecisionKey(CommunicatorClass(n_ranks, n_nodes), Collective(collective), Phase(phase), size_class)
    rest = dict(zip(DECISION_COLUMNS[8:], row[10:], strict=True))
    return Decision(job_id, fabric_id, key, candidate_of(row[7], row[8], row[9]), **rest)
