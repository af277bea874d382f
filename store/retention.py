"""How much the store keeps."""

from __future__ import annotations

import sqlite3
from typing import Final

import msgspec

RETAIN_EVERY_ROWS: Final = 100_000


class Retention(msgspec.Struct, frozen=True):
    """How much is kept: the newest measurements of each fabric, and nothing of jobs started too long ago."""

    max_rows_per_fabric: int = 1_000_000
    max_age_s: float = 365 * 86400.0


def retain(connection: sqlite3.Connection, retention: Retention, now_s: float) -> None:
    """Delete measurements that are too old, and the oldest of fabrics that have too many."""
    oldest_s = now_s - retention.max_age_s
    connection.execute("DELETE FROM measurements WHERE measured_at_s < ?", (oldest_s,))
    old_jobs = "SELECT id FROM jobs WHERE started_at_s > 0 AND started_at_s < ?"
    for table in ("steps", "decisions"):
        connection.execute(f"DELETE FROM {table} WHERE job IN ({old_jobs})", (oldest_s,))
    counts = connection.execute(
        "SELECT s.fabric, count(*) FROM measurements m JOIN series s ON s.id = m.series GROUP BY s.fabric"
    ).fetchall()
    for fabric, n_rows in counts:
        if n_rows > retention.max_rows_per_fabric:
            connection.execute(
                "DELETE FROM measurements WHERE id IN (SELECT m.id FROM measurements m"
                " JOIN series s ON s.id = m.series WHERE s.fabric = ? ORDER BY m.id LIMIT ?)",
                (fabric, n_rows - retention.max_rows_per_fabric),
            )
