"""Reduces units to one line per job and setting: medians at the network's usual level, gains within the job.

This works as for one node's jobs (`tuner/modeling/levels.py`): if the network was slower during a part of a job,
durations are converted to its usual speed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow

from ...store.records import size_class
from ..modeling.levels import MIN_BLOCK_STEPS, Cells, levelled

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Columns = dict[str, Any]

JOBS_AT_ONCE: Final = 256
MIN_CALLS: Final = 4
"""Least calls of a setting in a job."""
MIN_SPREAD: Final = 0.01
_SAME_JOB: Final = "fabric_id, contributor, job_id"
_KEY: Final = ("n_ranks", "n_nodes", "collective", "phase")
_SETTING: Final = ("algorithm", "protocol", "n_channels", "is_default")
_NUMBERS: Final = (*_KEY, "message_bytes", *_SETTING, "nccl_version", "tuner_abi", "block", "n_calls")

LINES: Final = """
CREATE TABLE lines (
    fabric_id VARCHAR, contributor VARCHAR, job_id VARCHAR, nccl_version BIGINT, tuner_abi BIGINT,
    n_ranks BIGINT, n_nodes BIGINT, collective BIGINT, phase BIGINT, size_class BIGINT,
    algorithm BIGINT, protocol BIGINT, n_channels BIGINT, is_default BIGINT,
    n_calls BIGINT, log_us DOUBLE, spread DOUBLE, gain DOUBLE, gain_std DOUBLE)
"""
"""`gain` (log) is over NCCL's own choice in the same job; NaN if that was not measured."""


def refresh(connection: duckdb.DuckDBPyConnection) -> int:
    """Compute the lines of all jobs with new units again; the connection is that of `Merging`."""
    jobs = connection.execute(f"SELECT {_SAME_JOB} FROM changed_jobs ORDER BY ALL").fetchall()
    for at in range(0, len(jobs), JOBS_AT_ONCE):
        _refresh(connection, jobs[at : at + JOBS_AT_ONCE])
    return len(jobs)


def _refresh(connection: duckdb.DuckDBPyConnection, jobs: list[tuple[str, str, str]]) -> None:
    columns = list(zip(*jobs, strict=True))
    names = dict(zip(_SAME_JOB.split(", "), columns, strict=True))
    wanted = pyarrow.table({**names, "job": np.arange(len(jobs))})
    connection.register("wanted", wanted)
    connection.begin()
    try:
        found = connection.execute(
            f"SELECT job, log_us, spread, {', '.join(_NUMBERS)} FROM units JOIN wanted USING ({_SAME_JOB}) ORDER BY job"
        ).fetchnumpy()
        job = np.asarray(found.pop("job"))
        units = {name: np.asarray(column) for name, column in found.items()}
        starts = np.searchsorted(job, np.arange(len(jobs) + 1))
        lines = [
            _lines({name: column[low:high] for name, column in units.items()}) | {"job": at}
            for at, (low, high) in enumerate(pairwise(starts.tolist()))
            if high > low
        ]
        connection.execute(f"DELETE FROM lines USING wanted WHERE {_joined('lines', 'wanted')}")
        if lines:
            table = {name: np.concatenate([one[name] for one in lines]) for name in lines[0] if name != "job"}
            at = np.repeat([one["job"] for one in lines], [len(one["gain"]) for one in lines])
            for name, column in names.items():
                table[name] = np.array(column, dtype=object)[at]
            connection.register("made", pyarrow.table(table))
            connection.execute("INSERT INTO lines BY NAME SELECT * FROM made")
            connection.unregister("made")
        connection.execute(f"DELETE FROM changed_jobs USING wanted WHERE {_joined('changed_jobs', 'wanted')}")
        connection.commit()
    except BaseException:
        connection.rollback()
        raise
    finally:
        connection.unregister("wanted")


def _joined(left: str, right: str) -> str:
    return " AND ".join(f"{left}.{name} = {right}.{name}" for name in _SAME_JOB.split(", "))


def _lines(units: Columns) -> Columns:
    """Columns of `LINES` except the job's, shape (n_lines,), of one job's units (columns of `Merging`, shape (n,))."""
    integers = {name: units[name].astype(np.int64) for name in _NUMBERS}
    sizes, size = np.unique(integers["message_bytes"], return_inverse=True)
    integers["size_class"] = np.array([size_class(one) for one in sizes.tolist()], np.int64)[size]
    logs = units["log_us"].astype(np.float64)
    shift, doubt = _levels(integers, logs, units["spread"].astype(np.float64))
    logs = logs - shift
    named = [integers[name] for name in ("nccl_version", "tuner_abi", *_KEY, "size_class", *_SETTING)]
    lines, line = np.unique(np.stack(named, axis=1), axis=0, return_inverse=True)
    line = line.reshape(-1)
    n_calls: Floats = np.bincount(line, integers["n_calls"]).astype(np.float64)
    variance = np.bincount(line, integers["n_calls"] * units["spread"].astype(np.float64) ** 2) / n_calls
    level_std = np.zeros(len(lines))
    np.maximum.at(level_std, line, doubt)
    log_us = _weighted_medians(line, logs, integers["n_calls"])
    spread = np.maximum(np.sqrt(variance), MIN_SPREAD)
    base = _baselines(lines, n_calls)
    has_gain = base >= 0
    gain = np.where(has_gain, log_us[base] - log_us, np.nan)
    gain_std = np.sqrt(spread**2 / n_calls + spread[base] ** 2 / n_calls[base] + level_std**2)
    kept = n_calls >= MIN_CALLS
    names = ("nccl_version", "tuner_abi", *_KEY, "size_class", *_SETTING)
    found: Columns = dict(zip(names, lines[kept].T.copy(), strict=True))
    return found | {
        "n_calls": n_calls[kept].astype(np.int64),
        "log_us": log_us[kept],
        "spread": spread[kept],
        "gain": gain[kept],
        "gain_std": np.where(has_gain, gain_std, np.nan)[kept],
    }


def _levels(units: dict[str, Ints], logs: Floats, spread: Floats) -> tuple[Floats, Floats]:
    """Shifts to subtract from the logs of units, and the doubt (log) of each in comparisons with NCCL's own choice."""
    _, place = np.unique(np.stack([units["n_ranks"], units["n_nodes"]], axis=1), axis=0, return_inverse=True)
    names = [units[name] for name in (*_KEY, "message_bytes")]
    of_key = [units[name] for name in (*_KEY, "size_class")]
    _, messages = np.unique(np.stack(names, axis=1), axis=0, return_inverse=True)
    _, key = np.unique(np.stack(of_key, axis=1), axis=0, return_inverse=True)
    settings = np.stack([messages.reshape(-1), *(units[name] for name in _SETTING)], axis=1)
    found, first, cell = np.unique(settings, axis=0, return_index=True, return_inverse=True)
    default_of = np.full(int(messages.max()) + 1, -1)
    is_default = np.flatnonzero(found[:, -1])
    default_of[found[is_default, 0]] = is_default
    cells = Cells(place.reshape(-1)[first], key.reshape(-1)[first], default_of[found[:, 0]])
    cell = cell.reshape(-1)
    # A unit stands for its calls: as many as levels need, with the same spread.
    n_calls = np.minimum(units["n_calls"], MIN_BLOCK_STEPS)
    unit = np.repeat(np.arange(len(logs)), n_calls)
    nth = np.arange(len(unit)) - np.repeat(np.cumsum(n_calls) - n_calls, n_calls)
    step = units["block"][unit] * MIN_BLOCK_STEPS + nth
    calls = logs[unit] + spread[unit] * np.where(n_calls[unit] == MIN_BLOCK_STEPS, _QUARTERS[nth], 0.0)
    order = np.argsort(step, kind="stable").argsort(kind="stable")
    levels = levelled(cells, cell[unit], np.zeros(len(unit), np.int64), order, step, calls)
    if levels is None:
        return np.zeros(len(logs)), np.zeros(len(logs))
    return levels.shift[np.cumsum(n_calls) - 1], levels.doubt[cell]


_QUARTERS: Final = np.array([-1.15, -0.32, 0.32, 1.15])
"""Middles of the quarters of a normal distribution, for `MIN_BLOCK_STEPS` calls."""


def _weighted_medians(group: Ints, values: Floats, weights: Ints) -> Floats:
    """Weighted median of each group, shape (n_groups,)."""
    order = np.lexsort((values, group))
    group, values, weights = group[order], values[order], weights[order]
    ends = np.cumsum(weights)
    starts = np.flatnonzero(np.r_[True, np.diff(group) != 0])
    before = ends[starts] - weights[starts]
    totals = np.add.reduceat(weights, starts)
    at = np.searchsorted(ends, before + 0.5 * totals)
    return values[at]


def _baselines(lines: Ints, n_calls: Floats) -> Ints:
    """For each line, the index of NCCL's own choice at the same key with most calls; -1: there is none."""
    _, key = np.unique(lines[:, : -len(_SETTING)], axis=0, return_inverse=True)
    key = key.reshape(-1)
    of_key = np.full(int(key.max()) + 1, -1)
    for at in sorted(np.flatnonzero(lines[:, -1]).tolist(), key=lambda at: n_calls[at]):
        of_key[key[at]] = at
    return of_key[key]
