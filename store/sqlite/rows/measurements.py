"""Blocks of measurements to rows and back, in bulk.

The writer shares the interpreter with the daemon's socket thread, so rows are never bound one
by one: each statement carries thousands of values and SQLite works without holding the GIL.

A block has dtype MEASUREMENT, or STORED with row ids, and shape (n,).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...records import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Algorithm,
    Candidate,
    Collective,
    Outcome,
    Phase,
    Protocol,
    Source,
    TimingSource,
)

UNKNOWN: Final = 255
"""`algorithm` and `protocol` of a measurement that does not name them; `protocol` may be unknown alone."""

MEASUREMENT_FIELDS: Final = [
    ("n_ranks", "<u4"),
    ("n_nodes", "<u4"),
    ("message_bytes", "<u8"),
    ("duration_us", "<f8"),
    ("epoch", "<u4"),
    ("step", "<u4"),
    ("memory_pressure", "<f4"),
    ("collective", "u1"),
    ("phase", "u1"),
    ("algorithm", "u1"),
    ("protocol", "u1"),
    ("n_channels", "u1"),
    ("is_default", "u1"),
    ("source", "u1"),
    ("outcome", "u1"),
    ("timing_source", "u1"),
    ("chunk_bytes", "<u4"),
]
"""numpy dtype fields of a block of measurements; NaN memory_pressure and UNKNOWN mean unknown."""

MEASUREMENT: Final = np.dtype(MEASUREMENT_FIELDS)

_PLACE_FIELDS: Final = [("id", "<i8"), ("series", "<i8"), ("job", "<i8"), ("measured_at_s", "<f8")]
STORED: Final = np.dtype(MEASUREMENT_FIELDS + _PLACE_FIELDS)
"""A measurement with its row and series: `id` grows in the order of recording, a series has one setting and size."""

_SETTING_OF: Final = (
    "n_ranks", "n_nodes", "message_bytes", "collective", "phase", "algorithm", "protocol", "n_channels",
    "is_default", "source", "outcome", "timing_source", "chunk_bytes",
)  # fmt: skip
_SERIES: Final = np.dtype([(name, MEASUREMENT[name]) for name in _SETTING_OF])
SERIES_COLUMNS: Final = ("fabric", *_SETTING_OF)
_ROW_COLUMNS: Final = ("series", "job", "epoch", "step", "duration_us", "memory_pressure", "measured_at_s")
_ROWS_PER_STATEMENT: Final = 1024
"""7 values a row: below SQLite's usual limit of 32,766 parameters."""


@cache
def _insert(n_rows: int) -> str:
    marks = "(" + ",".join("?" * len(_ROW_COLUMNS)) + ")"
    return f"INSERT INTO measurements ({','.join(_ROW_COLUMNS)}) VALUES " + ",".join([marks] * n_rows)


class SeriesIds:
    """Row ids of the series written so far; only the writer thread uses it."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, bytes], int] = {}

    def forget(self) -> None:
        """After a rollback: ids handed out since may not exist."""
        self._ids.clear()

    def of_block(self, connection: sqlite3.Connection, fabric: int, block: NDArray[np.void]) -> NDArray[np.int64]:
        """Series id of each measurement, shape (n,); unknown series are inserted."""
        keys = np.empty(len(block), _SERIES)
        for name in _SETTING_OF:
            keys[name] = block[name]
        raw, inverse = np.unique(keys.view(f"V{_SERIES.itemsize}"), return_inverse=True)
        ids = [self._id(connection, fabric, key.tobytes()) for key in raw]
        return np.asarray(ids, np.int64)[inverse]

    def _id(self, connection: sqlite3.Connection, fabric: int, key: bytes) -> int:
        known = self._ids.get((fabric, key))
        if known is not None:
            return known
        values = (fabric, *np.frombuffer(key, _SERIES)[0].item())
        columns, marks = SERIES_COLUMNS, ",".join("?" * len(values))
        connection.execute(f"INSERT OR IGNORE INTO series ({','.join(columns)}) VALUES ({marks})", values)
        where = " AND ".join(f"{column} = ?" for column in columns)
        (found,) = connection.execute(f"SELECT id FROM series WHERE {where}", values).fetchone()
        self._ids[fabric, key] = found
        return int(found)


def insert(
    connection: sqlite3.Connection,
    series: NDArray[np.int64],
    job: int,
    block: NDArray[np.void],
    measured_at_s: int,
) -> None:
    """Append measurements; `series` has the series id of each, shape (n,)."""
    n_columns = len(_ROW_COLUMNS)
    start = 0
    while start < len(block):
        # Powers of two, since a connection keeps its last 128 statements with their values. One statement for each
        # length of blocks would take tens of megabytes.
        n_rows = min(_ROWS_PER_STATEMENT, 1 << (len(block) - start).bit_length() - 1)
        part = block[start : start + n_rows]
        values: list[Any] = [None] * (n_rows * n_columns)
        values[0::n_columns] = series[start : start + n_rows].tolist()
        values[1::n_columns] = [job] * n_rows
        values[2::n_columns] = part["epoch"].tolist()
        values[3::n_columns] = part["step"].tolist()
        values[4::n_columns] = part["duration_us"].tolist()
        values[5::n_columns] = part["memory_pressure"].tolist()  # SQLite stores NaN as NULL
        values[6::n_columns] = [measured_at_s] * n_rows
        connection.execute(_insert(n_rows), values)
        start += n_rows
    connection.execute("UPDATE tallies SET n_rows = n_rows + ? WHERE name = 'measurements'", (len(block),))


def select(
    connection: sqlite3.Connection,
    where: str,
    parameters: tuple[Any, ...],
    limit: int | None,
    names: Sequence[str] = STORED.names or (),
    series: str = "series",
) -> NDArray[np.void]:
    """Measurements that meet a condition, oldest first, with the named fields of STORED; few are faster.

    Args:
        where: SQL over `m` (measurements) and `s` (series), with a `?` for each parameter.
        limit: number of newest rows; None: all.
        series: table or view of the series to read.
    """
    of_measurements = {"id", *_ROW_COLUMNS}
    columns = {name: f"m.{name}" if name in of_measurements else f"s.{name}" for name in names}
    if "memory_pressure" in columns:
        columns["memory_pressure"] = "ifnull(m.memory_pressure, 9e999)"  # numpy takes no NULL
    rows = connection.execute(
        f"SELECT {', '.join(columns.values())} FROM measurements m JOIN {series} s ON s.id = m.series"
        f" WHERE {where} ORDER BY m.id DESC LIMIT ?",
        (*parameters, -1 if limit is None else limit),
    )
    block = np.fromiter(rows, np.dtype([(name, STORED[name]) for name in names]))[::-1]
    if "memory_pressure" in columns:
        block["memory_pressure"][np.isinf(block["memory_pressure"])] = np.nan
    return block


def _allowed(*values: int) -> NDArray[np.bool_]:
    """Whether each value of one byte is allowed, shape [256]."""
    table = np.zeros(256, np.bool_)
    table[list(values)] = True
    return table


_ALLOWED: Final = {
    "collective": _allowed(*Collective),
    "phase": _allowed(*Phase),
    "algorithm": _allowed(*Algorithm, UNKNOWN),
    "protocol": _allowed(*Protocol, UNKNOWN),
    "n_channels": _allowed(*range(65)),
    "is_default": _allowed(0, 1),
    "source": _allowed(*Source),
    "outcome": _allowed(*Outcome),
    "timing_source": _allowed(*TimingSource),
}


def well_formed(block: NDArray[np.void]) -> NDArray[np.bool_]:
    """Whether each row of a MEASUREMENT block holds values that the records allow, shape (n,)."""
    chunk_bytes = block["chunk_bytes"]
    good: NDArray[np.bool_] = (
        (block["message_bytes"] - 1 < 2**62 - 1)  # 0 wraps around
        & (block["duration_us"] >= 0)
        & (block["duration_us"] < np.inf)
        & ((block["algorithm"] != UNKNOWN) | (block["protocol"] == UNKNOWN))
        & ((chunk_bytes == 0) | ((chunk_bytes >= MIN_CHUNK_BYTES) & (chunk_bytes <= MAX_CHUNK_BYTES)))
        & (chunk_bytes % 1024 == 0)
    )
    for name, table in _ALLOWED.items():
        good &= table[block[name]]
    return good


def candidate_of(algorithm: int | None, protocol: int | None, n_channels: int, chunk_bytes: int = 0) -> Candidate:
    """The candidate that integer columns name.

    Args:
        algorithm: None or UNKNOWN: no opinion, and none on the protocol.
        protocol: None or UNKNOWN: not known.
    """
    if algorithm is None or algorithm == UNKNOWN:
        return Candidate(n_channels=n_channels, chunk_bytes=chunk_bytes)
    known_protocol = None if protocol is None or protocol == UNKNOWN else Protocol(protocol)
    return Candidate(Algorithm(algorithm), known_protocol, n_channels, chunk_bytes)
