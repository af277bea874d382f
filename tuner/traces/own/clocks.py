"""The ranks of one start of a job on one clock.

Each rank has its own clock. A collective ends on all ranks at nearly the same time, so the median difference of ends
is the offset of two clocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ....store.wire import FLAG_TIMED
from .jobs import RankFile
from .reader import OwnTrace, read_own

Array = NDArray[Any]
Span = tuple[float, float]
"""(begin, end) of a step in microseconds."""

_COMPARED: Final = 1024
"""Collectives of a communicator whose ends serve to compare two ranks' clocks."""
_LONGEST_US: Final = 1e15
"""Longer steps mean damage."""


@dataclass
class RankTimes:
    """One rank's collectives and steps; times are microseconds since its first collective, before `shift`."""

    number: int
    rows: Array
    """Timed records of OBSERVATION_FIELDS, shape (n,), by start; decisions if none was timed."""
    begin_us: Array
    logged: Array
    """Steps of STEP_FIELDS, shape (m,)."""
    steps: dict[int, Span]

    @classmethod
    def read(cls, file: RankFile) -> RankTimes:
        """One file, whole in memory."""
        trace = read_own(file.path)
        rows = _completed(trace)
        rows = rows[np.argsort(rows["start_ns"], kind="stable")]
        # As unsigned numbers, any difference is right.
        since_ns = rows["start_ns"].astype(np.uint64) - rows["start_ns"][:1].astype(np.uint64)
        begin_us = since_ns.astype(np.float64) / 1e3
        return cls(file.header.rank, rows, begin_us, trace.steps, _step_spans(trace.steps, rows["step"], begin_us))

    @property
    def first_steps(self) -> Mapping[int, int]:
        """The first step under each epoch."""
        pairs = zip(self.logged["epoch"].tolist(), self.logged["step"].tolist(), strict=True)
        return dict(reversed(list(pairs)))

    @property
    def earliest_us(self) -> float:
        """Earliest begin of its collectives and steps."""
        return min([0.0, *(begin_us for begin_us, _ in self.steps.values())])

    def only(self, numbers: Array) -> RankTimes:
        """Its records of the steps `numbers`, shape (n,)."""
        kept = np.isin(self.rows["step"], numbers)
        steps = {step: self.steps[step] for step in numbers.tolist() if step in self.steps}
        logged = self.logged[np.isin(self.logged["step"], numbers)]
        return RankTimes(self.number, self.rows[kept], self.begin_us[kept], logged, steps)

    def shift(self, by_us: float) -> None:
        """Add an offset to all times."""
        self.begin_us = self.begin_us + by_us
        self.steps = {step: (begin_us + by_us, end_us + by_us) for step, (begin_us, end_us) in self.steps.items()}


class Clocks:
    """Places each rank on the clock of the first one."""

    def __init__(self) -> None:
        self.n_alone = 0
        """Ranks that share no timed collective with an earlier one."""
        self._ends: dict[int, tuple[Array, Array]] = {}
        """Keys of each communicator's first collectives, and their ends on the first rank's clock."""

    def offset_us(self, rank: RankTimes) -> float:
        """The offset to add to the times of `rank`."""
        own = {}
        for comm_id in np.unique(rank.rows["comm_id"]).tolist():
            chosen = np.flatnonzero(rank.rows["comm_id"] == comm_id)[:_COMPARED]
            rows = rank.rows[chosen]
            keys = rows["sequence"].astype(np.uint64) | rows["collective"].astype(np.uint64) << np.uint64(32)
            own[comm_id] = keys, rank.begin_us[chosen] + np.maximum(rows["duration_us"], 0.0)
        differences = [
            _differences(self._ends[comm_id], ends) for comm_id, ends in own.items() if comm_id in self._ends
        ]
        found = np.concatenate([*differences, np.empty(0)])
        offset_us = float(np.median(found)) if len(found) else 0.0
        self.n_alone += bool(self._ends) and not len(found)
        for comm_id, (keys, ends_us) in own.items():
            self._ends.setdefault(comm_id, (keys, ends_us + offset_us))
        return offset_us


def is_timed(rows: Array) -> Array:
    """Whether records of OBSERVATION_FIELDS, shape (n,), have a duration: bool (n,)."""
    duration_us = rows["duration_us"]
    return np.asarray((rows["flags"] & FLAG_TIMED != 0) & (duration_us >= 0) & np.isfinite(duration_us))


def _completed(trace: OwnTrace) -> Array:
    timed = is_timed(trace.records)
    return trace.records[timed] if timed.any() else trace.records


def _step_spans(steps: Array, row_step: Array, begin_us: Array) -> dict[int, Span]:
    """Begin and end of each logged step, shape (m,), since the rank's first collective.

    The log has durations from one boundary to the next. Consecutive steps are placed without gaps, as late as possible
    without a collective that starts before its step.
    """
    numbers, first = np.unique(row_step, return_index=True)
    first_us = dict(zip(numbers.tolist(), begin_us[first].tolist(), strict=True))
    lengths_us = {
        step: length_us
        for step, length_us in zip(steps["step"].tolist(), steps["duration_us"].tolist(), strict=True)
        if 0 <= length_us <= _LONGEST_US
    }
    spans: dict[int, Span] = {}
    runs: list[list[int]] = []
    for step in sorted(lengths_us):
        if runs and runs[-1][-1] + 1 == step:
            runs[-1].append(step)
        else:
            runs.append([step])
    now_us = -math.inf
    for run in runs:
        passed_us = list(itertools.accumulate((lengths_us[step] for step in run), initial=0.0))
        starts = [first_us[step] - passed for step, passed in zip(run, passed_us, strict=False) if step in first_us]
        at_us = max(now_us, min(starts, default=now_us if spans else 0.0))
        for step, begin, end in zip(run, passed_us, passed_us[1:], strict=False):
            spans[step] = (at_us + begin, at_us + end)
        now_us = at_us + passed_us[-1]
    return spans


def _differences(known: tuple[Array, Array], own: tuple[Array, Array]) -> Array:
    _, at_known, at_own = np.intersect1d(known[0], own[0], return_indices=True)
    return np.asarray(known[1][at_known] - own[1][at_own])
