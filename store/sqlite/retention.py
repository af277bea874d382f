"""How much the store keeps."""

from __future__ import annotations

import sqlite3
from typing import Final

import msgspec

MOST_ROWS_BETWEEN: Final = 100_000


class Retention(msgspec.Struct, frozen=True):
    """How much is kept: the newest measurements of each fabric.

    A job that began too long ago goes as soon as none of its measurements is left.
    """

    max_rows_per_fabric: int = 1_000_000
    max_age_s: float = 365 * 86400.0

    @property
    def every_rows(self) -> int:
        """It is applied again after this many more rows: at most a tenth over the limit."""
        return max(1, min(MOST_ROWS_BETWEEN, self.max_rows_per_fabric // 10))


def retain(connection: sqlite3.Connection, retention: Retention, now_s: float) -> None:
    """Delete measurements that are too old, the oldest of fabrics that have too many, and jobs without any.

    Args:
        connection: in a transaction that writes.
        retention: how much is kept.
        now_s: Unix time.
    """
    oldest_s = now_s - retention.max_age_s
    connection.execute("DELETE FROM measurements WHERE measured_at_s < ?", (oldest_s,))
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
    old_jobs = "started_at_s > 0 AND started_at_s < ? AND id NOT IN (SELECT job FROM measurements)"
    for table in ("steps", "decisions"):
        connection.execute(f"DELETE FROM {table} WHERE job IN (SELECT id FROM jobs WHERE {old_jobs})", (oldest_s,))
    connection.execute(f"DELETE FROM jobs WHERE {old_jobs}", (oldest_s,))
