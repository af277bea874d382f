"""How much the store keeps.

A row's age is its place in the order of recording. The clock only tells which rows are of one day, so a day with a
wrong date counts as one more day.
"""

from __future__ import annotations

import logging
import sqlite3
from typing import Final

import msgspec

_log = logging.getLogger("zerotune.store")

MOST_ROWS_BETWEEN: Final = 100_000
_DAY_S: Final = 86400


class Retention(msgspec.Struct, frozen=True):
    """How much is kept: the newest measurements of each fabric, and none older than the newest days.

    A job is deleted once none of its measurements is left and jobs of `max_days` newer days exist.
    """

    max_rows_per_fabric: int = 1_000_000
    max_days: int = 365
    """Days on which anything was recorded; others do not count."""

    @property
    def every_rows(self) -> int:
        """Number of new rows after which retention applies again; at most a tenth of the limit."""
        return max(1, min(MOST_ROWS_BETWEEN, self.max_rows_per_fabric // 10))


def retain(connection: sqlite3.Connection, retention: Retention) -> None:
    """Delete measurements of old days, the oldest of fabrics with too many, and old jobs without measurements."""
    last_id = _last_id_before(connection, "measurements", "measured_at_s", retention.max_days)
    n_old = connection.execute("DELETE FROM measurements WHERE id <= ?", (last_id,)).rowcount
    counts = connection.execute(
        "SELECT s.fabric, count(*) FROM measurements m JOIN series s ON s.id = m.series GROUP BY s.fabric"
    ).fetchall()
    n_over = 0
    for fabric, n_rows in counts:
        if n_rows > retention.max_rows_per_fabric:
            n_over += connection.execute(
                "DELETE FROM measurements WHERE id IN (SELECT m.id FROM measurements m"
                " JOIN series s ON s.id = m.series WHERE s.fabric = ? ORDER BY m.id LIMIT ?)",
                (fabric, n_rows - retention.max_rows_per_fabric),
            ).rowcount
    if n_old or n_over:
        connection.execute("UPDATE tallies SET n_rows = n_rows - ? WHERE name = 'measurements'", (n_old + n_over,))
    last_id = _last_id_before(connection, "jobs", "started_at_s", retention.max_days)
    old_jobs = "started_at_s > 0 AND id <= ? AND id NOT IN (SELECT job FROM measurements)"
    for table in ("steps", "decisions"):
        connection.execute(f"DELETE FROM {table} WHERE job IN (SELECT id FROM jobs WHERE {old_jobs})", (last_id,))
    n_jobs = connection.execute(f"DELETE FROM jobs WHERE {old_jobs}", (last_id,)).rowcount
    if n_old or n_over or n_jobs:
        _log.warning(
            "retention removed %s measurements from before the newest %s days, %s beyond %s of a fabric, and %s jobs",
            f"{n_old:,}", f"{retention.max_days:,}", f"{n_over:,}", f"{retention.max_rows_per_fabric:,}", f"{n_jobs:,}",
        )  # fmt: skip


def _last_id_before(connection: sqlite3.Connection, table: str, time_s: str, max_days: int) -> int:
    """Id of the last row that was recorded before the newest `max_days` days; 0 if there is none."""
    found = connection.execute(
        f"SELECT max(id) FROM {table} WHERE {time_s} > 0 GROUP BY CAST({time_s} / {_DAY_S} AS INTEGER)"
        " ORDER BY 1 DESC LIMIT 1 OFFSET ?",
        (max_days,),
    ).fetchone()
    return 0 if found is None else int(found[0])
