"""Blocks of measurements to rows and back, in bulk.

The writer shares the interpreter with the daemon's socket thread, so rows are never bound one
by one: each statement carries thousands of values and SQLite works without holding the GIL.
"""

from __future__ import annotations

import sqlite3
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zerotune.store.records import (
    Algorithm,
    Candidate,
    CandidateStatistics,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Outcome,
    Phase,
    Protocol,
    Source,
    TimingSource,
    size_class,
)
from zerotune.store.sqlite.rows.levels import Cells, Levelled, levelled

UNKNOWN: Final = 255
"""`algorithm` and `protocol` of a measurement that does not say which ran; `protocol` may be unknown alone."""

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
]
"""numpy dtype fields of a block of measurements; NaN memory_pressure and UNKNOWN say unknown."""

MEASUREMENT: Final = np.dtype(MEASUREMENT_FIELDS)

_SETTING_OF: Final = (
    "n_ranks", "n_nodes", "message_bytes", "collective", "phase", "algorithm", "protocol", "n_channels",
    "is_default", "source", "outcome", "timing_source",
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
    """Row ids of the series met so far; belongs to the writer thread."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, bytes], int] = {}

    def forget(self) -> None:
        """After a rollback: ids handed out since may not exist."""
        self._ids.clear()

    def of_block(self, connection: sqlite3.Connection, fabric: int, block: NDArray[np.void]) -> NDArray[np.int64]:
        """Ids of the series that measurements belong to; unknown series are inserted.

        Args:
            connection: in a transaction that writes.
            fabric: id of the fabric's row.
            block: MEASUREMENT, shape (n,).

        Returns:
            Series id of each row of `block`, shape (n,).
        """
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
        marks = ",".join("?" * len(values))
        connection.execute(f"INSERT OR IGNORE INTO series ({','.join(SERIES_COLUMNS)}) VALUES ({marks})", values)
        where = " AND ".join(f"{column} = ?" for column in SERIES_COLUMNS)
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
    """Append measurements.

    Args:
        connection: in a transaction that writes.
        series: series id of each measurement, shape (n,).
        job: id of the job's row.
        block: MEASUREMENT, shape (n,).
        measured_at_s: Unix time, of all of them.
    """
    n_columns = len(_ROW_COLUMNS)
    start = 0
    while start < len(block):
        # Powers of two: a connection keeps its last 128 statements with their values, and of one for each length that
        # blocks have that is tens of megabytes.
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
    *,
    at_usual_level: bool = False,
) -> NDArray[np.void]:
    """Measurements that meet a condition.

    Args:
        connection: a reader's.
        where: SQL over `m` (measurements) and `s` (series), with a `?` for each parameter.
        parameters: values of the question marks.
        limit: the newest so many; None: all.
        at_usual_level: with durations as they would have been at the network's usual speed; see levels.py.

    Returns:
        MEASUREMENT, shape (n,), oldest first.
    """
    columns = ", ".join(f"m.{name}" if name in _ROW_COLUMNS else f"s.{name}" for name, _ in MEASUREMENT_FIELDS)
    rows = connection.execute(
        f"SELECT {columns}, m.job FROM measurements m JOIN series s ON s.id = m.series"
        f" WHERE {where} ORDER BY m.id DESC LIMIT ?",
        (*parameters, -1 if limit is None else limit),
    ).fetchall()
    pressure = MEASUREMENT.names.index("memory_pressure") if MEASUREMENT.names else 0
    filled = [
        row[:-1] if row[pressure] is not None else (*row[:pressure], np.nan, *row[pressure + 1 : -1]) for row in rows
    ]
    block = np.array(filled, MEASUREMENT)[::-1]
    if at_usual_level:
        _shift_to_usual_level(block, job=np.array([row[-1] for row in rows], np.int64)[::-1])
    return block


def _allowed(*values: int) -> NDArray[np.bool_]:
    """Truth by value of one byte, shape [256]."""
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
    """Which rows of `block` (MEASUREMENT, shape [n]) hold values that the records allow, shape [n]."""
    good: NDArray[np.bool_] = (
        (block["message_bytes"] - 1 < 2**62 - 1)  # 0 wraps around
        & (block["duration_us"] >= 0)
        & (block["duration_us"] < np.inf)
        & ((block["algorithm"] != UNKNOWN) | (block["protocol"] == UNKNOWN))
    )
    for name, table in _ALLOWED.items():
        good &= table[block[name]]
    return good


def _shift_to_usual_level(block: NDArray[np.void], job: NDArray[np.int64]) -> None:
    """Change durations in place; `job` has the id of each row's job."""
    usable = np.flatnonzero(block["outcome"] == Outcome.ok)
    if not len(usable):
        return
    here = block[usable]
    columns = np.stack([here[name].astype(np.int64) for name in _SETTING_COLUMNS], axis=1)
    settings, cell = np.unique(columns, axis=0, return_inverse=True)
    step = here["step"].astype(np.int64)
    levels = _levels_of(settings, cell.reshape(-1), job[usable], usable, step, here["duration_us"])
    if levels is not None:
        block["duration_us"][usable] *= np.exp(-levels.shift)


_SETTING_COLUMNS: Final = (
    "n_ranks", "n_nodes", "collective", "phase", "message_bytes", "algorithm", "protocol", "n_channels", "is_default",
)  # fmt: skip


_STATISTICS: Final = """
SELECT s.n_ranks, s.n_nodes, s.collective, s.phase, s.message_bytes, s.algorithm, s.protocol, s.n_channels,
       s.is_default, gathered.job, gathered.last_seen_s, gathered.ids, gathered.steps, gathered.durations_us
FROM (SELECT series, job, max(measured_at_s) AS last_seen_s,
             group_concat(id) AS ids, group_concat(step) AS steps, group_concat(duration_us) AS durations_us
      FROM measurements
      WHERE series IN (SELECT id FROM series WHERE outcome = ? AND
                       fabric = (SELECT id FROM fabrics WHERE fabric_id = ?))
            AND (? IS NULL OR job = (SELECT id FROM jobs WHERE job_id = ?))
            AND job IS NOT (SELECT id FROM jobs WHERE job_id = ?)
      GROUP BY series, job) gathered
JOIN series s ON s.id = gathered.series
"""


def statistics(
    connection: sqlite3.Connection, fabric_id: str, job_id: str | None = None, without_job: str | None = None
) -> list[CandidateStatistics]:
    """Summaries of `fabric_id` by key, candidate and who chose it, sorted; see `Store.statistics`.

    SQLite gathers each series' durations into one text, so that a million rows cost this thread a
    few hundred Python objects.

    Args:
        connection: a reader's.
        fabric_id: the fabric that they were measured on.
        job_id: of this job only; None: of all jobs.
        without_job: leave this job's out; None: leave none out.

    Returns:
        One entry per (key, candidate, chosen by NCCL or not), sorted by key.
    """
    parts = connection.execute(_STATISTICS, (Outcome.ok, fabric_id, job_id, job_id, without_job)).fetchall()
    if not parts:
        return []
    settings, setting = np.unique(np.array([part[:9] for part in parts], np.int64), axis=0, return_inverse=True)
    lengths = [part[11].count(",") + 1 for part in parts]
    order, step = (np.concatenate([np.fromstring(part[at], np.int64, sep=",") for part in parts]) for at in (11, 12))
    durations_us = np.concatenate([np.fromstring(part[13], np.float64, sep=",") for part in parts])
    cell = np.repeat(setting.reshape(-1).astype(np.int64), lengths)
    job = np.repeat(np.array([part[9] for part in parts], np.int64), lengths)
    doubt = np.zeros(len(settings))
    levels = _levels_of(settings, cell, job, order, step, durations_us)
    if levels is not None:
        durations_us *= np.exp(-levels.shift)
        doubt = levels.doubt
    groups: dict[tuple[DecisionKey, Candidate, bool], list[int]] = {}
    ends = np.cumsum(lengths)
    for at, row in enumerate(parts):
        communicator = CommunicatorClass(row[0], row[1])
        key = DecisionKey(communicator, Collective(row[2]), Phase(row[3]), size_class(row[4]))
        candidate, is_default = candidate_of(row[5], row[6], row[7]), bool(row[8])
        groups.setdefault((key, candidate, is_default), []).append(at)
    found = []
    for (key, candidate, is_default), members in groups.items():
        of_group = np.concatenate([durations_us[ends[at] - lengths[at] : ends[at]] for at in members])
        found.append(
            CandidateStatistics(
                key=key,
                candidate=candidate,
                is_default=is_default,
                count=len(of_group),
                median_us=float(np.median(of_group)),
                mean_us=float(of_group.mean()),
                std_us=float(of_group.std(ddof=1)) if len(of_group) > 1 else 0.0,
                min_us=float(of_group.min()),
                last_seen_s=float(max(parts[at][10] for at in members)),
                level_std=float(max(doubt[setting.reshape(-1)[at]] for at in members)),
            )
        )
    return sorted(found, key=lambda one: (one.key, str(one.candidate), one.is_default))


def _levels_of(
    settings: NDArray[np.int64],
    cell: NDArray[np.int64],
    job: NDArray[np.int64],
    order: NDArray[np.int64],
    step: NDArray[np.int64],
    durations_us: NDArray[np.float64],
) -> Levelled | None:
    """Corrections for a slower network, from columns of the store; see `levelled`.

    Args:
        settings: shape (n_cells, 9): n_ranks, n_nodes, collective, phase, message_bytes, algorithm, protocol,
            n_channels, and 1 where NCCL chose.
        cell: row of `settings` of each measurement, shape (n,), as the next four.
        job: id of its job.
        order: place in the order in which measurements were recorded.
        step: training step of the job.
        durations_us: measured durations.

    Returns:
        The corrections; None where the network was always as fast.
    """
    _, place = np.unique(settings[:, :2], axis=0, return_inverse=True)
    of_key = settings[:, :5].copy()
    of_key[:, 4] = [size_class(one) for one in of_key[:, 4].tolist()]
    _, key = np.unique(of_key, axis=0, return_inverse=True)
    _, messages = np.unique(settings[:, :5], axis=0, return_inverse=True)
    messages = messages.reshape(-1)
    is_default = np.flatnonzero(settings[:, 8])
    default_of = np.full(int(messages.max()) + 1, -1)
    default_of[messages[is_default]] = is_default
    cells = Cells(place.reshape(-1).astype(np.int64), key.reshape(-1).astype(np.int64), default_of[messages])
    with np.errstate(divide="ignore"):
        logs = np.log(durations_us)
    return levelled(cells, cell, job, order, step, np.maximum(logs, _LEAST_LOG))


_LEAST_LOG: Final = -20.0
"""Log duration at which shorter ones, practically zero, are clipped."""


def candidate_of(algorithm: int | None, protocol: int | None, n_channels: int) -> Candidate:
    """The candidate that integer columns name.

    Args:
        algorithm: None or UNKNOWN: no opinion, and none on the protocol.
        protocol: None or UNKNOWN: not known.
        n_channels: 0: no opinion.

    Returns:
        The candidate.
    """
    if algorithm is None or algorithm == UNKNOWN:
        return Candidate(n_channels=n_channels)
    told = None if protocol is None or protocol == UNKNOWN else Protocol(protocol)
    return Candidate(Algorithm(algorithm), told, n_channels)
