"""New measurements since the last read, in blocks, by a reader that never blocks the writer."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ..opening import open_for_reading

BLOCK_ROWS: Final = 100_000

_NEWEST: Final = "SELECT coalesce(max(id), 0) FROM measurements"
_SINCE: Final = (
    "SELECT m.id, j.job_id, s.collective, s.phase, s.algorithm, s.protocol, s.message_bytes, m.duration_us"
    " FROM measurements m JOIN series s ON s.id = m.series JOIN jobs j ON j.id = m.job"
    " WHERE m.id > ? ORDER BY m.id LIMIT ?"
)


class NewMeasurement(NamedTuple):
    """One measurement; its integers are those of zerotune.store.records."""

    row: int
    job_id: str
    collective: int
    phase: int
    algorithm: int
    protocol: int
    message_bytes: int
    duration_us: float


class NewMeasurements:
    """Reads the measurements of one store that are newer than row `last_row`."""

    def __init__(self, path: Path, last_row: int | None = 0) -> None:
        """`last_row` None: only what will be recorded from now on.

        Raises:
            StoreError: there is no usable store at `path`.
        """
        self._connection: sqlite3.Connection = open_for_reading(path)
        self.last_row = int(self._connection.execute(_NEWEST).fetchone()[0]) if last_row is None else last_row

    def read(self) -> Iterator[list[NewMeasurement]]:
        """Blocks of new measurements; each is read completely before it is yielded."""
        while rows := self._connection.execute(_SINCE, (self.last_row, BLOCK_ROWS)).fetchall():
            self.last_row = rows[-1][0]
            yield [NewMeasurement(*row) for row in rows]

    def close(self) -> None:
        """Free the connection."""
        self._connection.close()
