"""The ranks of a trace in a timeline: each one's steps, and one track per communicator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zerotune.store.errors import TraceError, UserError
from zerotune.store.records import CommunicatorClass, Decision
from zerotune.store.wire import FLAG_MATCHED, FLAG_TIMED
from zerotune.tuner.offline.chrome_trace.events import EventFile, Track
from zerotune.tuner.offline.chrome_trace.named import Span, by_field, collective_args, collective_name, draw_decisions
from zerotune.tuner.traces.own.jobs import OneStart, RankFile
from zerotune.tuner.traces.own.reader import OwnTrace, read_own

Array = NDArray[Any]

_COMPARED: Final = 1024
"""Collectives of a communicator by whose ends the clocks of two ranks are compared."""
_LONGEST_US: Final = 1e15
"""Longer steps are damage."""


def draw_ranks(events: EventFile, start: OneStart, decisions: Sequence[Decision]) -> list[str]:
    """Draw all ranks, one in memory at a time.

    Each rank has a clock of its own. A collective ends on all ranks at nearly the same time, so the median difference
    of ends says how far two clocks are apart.

    Args:
        events: the file.
        start: files of one start of a job.
        decisions: of that job.

    Returns:
        Remarks for the user.

    Raises:
        TraceError: no file can be read.
        UserError: nothing is recorded in them.
    """
    clocks = _Clocks()
    damaged = list(start.damaged)
    whole: list[tuple[RankFile, float]] = []
    earliest_us = 0.0
    for file in start.files:
        try:
            rank = _Rank.read(file)
        except TraceError as error:
            damaged.append(error)
            continue
        offset_us = clocks.offset_us(rank)
        whole.append((file, offset_us))
        earliest_us = min(earliest_us, offset_us + rank.earliest_us)
    if not whole:
        raise damaged[0]
    job = events.process(f"job {start.files[0].header.job_id}")
    is_decided = False
    for file, offset_us in whole:
        rank = _Rank.read(file)
        rank.shift(offset_us - earliest_us)
        if not is_decided and rank.steps:
            draw_decisions(Track(events, job, "decisions"), decisions, rank.steps, rank.first_steps)
            is_decided = True
        _draw_rank(events, rank)
    if not events.n_events:
        raise UserError("no step and no collective is recorded in the trace", "train longer, or name another trace")
    remarks = [f"{note[0].upper()}{note[1:]}." for note in start.notes]
    remarks += [f"Left out: {error.problem}." for error in damaged]
    if clocks.n_alone:
        remarks.append(f"{clocks.n_alone} rank(s) share no timed collective with others: they are drawn from time 0.")
    return remarks


@dataclass
class _Rank:
    """What is drawn of one rank; times in microseconds since its first collective until `shift`."""

    number: int
    rows: Array
    """Records of OBSERVATION_FIELDS, shape (n,), by start; the timed ones, or decisions where nothing was timed."""
    begin_us: Array
    logged: Array
    """Steps of STEP_FIELDS, shape (m,)."""
    steps: dict[int, Span]

    @classmethod
    def read(cls, file: RankFile) -> _Rank:
        trace = read_own(file.path)
        rows = _completed(trace)
        rows = rows[np.argsort(rows["start_ns"], kind="stable")]
        # Unsigned, the difference of any two is right.
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
        return min([0.0, *(begin_us for begin_us, _ in self.steps.values())])

    def shift(self, by_us: float) -> None:
        self.begin_us = self.begin_us + by_us
        self.steps = {step: (begin_us + by_us, end_us + by_us) for step, (begin_us, end_us) in self.steps.items()}


def _completed(trace: OwnTrace) -> Array:
    duration_us = trace.records["duration_us"]
    timed = (trace.records["flags"] & FLAG_TIMED != 0) & (duration_us >= 0) & np.isfinite(duration_us)
    return trace.records[timed] if timed.any() else trace.records


def _step_spans(steps: Array, row_step: Array, begin_us: Array) -> dict[int, Span]:
    """Begin and end of each logged step, shape (m,), since the rank's first collective.

    Logged are durations from one boundary to the next. Steps that follow each other are laid end to end, as late as
    no collective starts before its step does.
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


class _Clocks:
    """Places each rank on the clock of the first one."""

    def __init__(self) -> None:
        self.n_alone = 0
        """Ranks that share no timed collective with an earlier one."""
        self._ends: dict[int, tuple[Array, Array]] = {}
        """By communicator: keys of its first collectives, and their ends on the first rank's clock."""

    def offset_us(self, rank: _Rank) -> float:
        """What is to be added to the times of `rank`."""
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


def _differences(known: tuple[Array, Array], own: tuple[Array, Array]) -> Array:
    _, at_known, at_own = np.intersect1d(known[0], own[0], return_indices=True)
    return np.asarray(known[1][at_known] - own[1][at_own])


def _draw_rank(events: EventFile, rank: _Rank) -> None:
    pid = events.process(f"rank {rank.number}")
    track = Track(events, pid, "steps")
    of_step = {row["step"]: row for row in by_field(rank.logged)}
    for step, (begin_us, end_us) in rank.steps.items():
        args = {key: value for key, value in of_step[step].items() if key != "duration_us" and value == value}
        track.span(f"step {step}", "step", begin_us, end_us - begin_us, args)
    tracks: dict[int, Track] = {}
    for row, begin_us in zip(by_field(rank.rows), map(float, rank.begin_us), strict=True):
        comm_id = row["comm_id"]
        if comm_id not in tracks:
            size = CommunicatorClass(row["n_ranks"], row["n_nodes"])
            tracks[comm_id] = Track(events, pid, f"communicator {comm_id:x}, {size}")
        args = collective_args(row, is_default=not row["flags"] & FLAG_MATCHED)
        args["sequence"] = row["sequence"]
        if row["flags"] & FLAG_TIMED and 0 <= row["duration_us"] < np.inf:
            tracks[comm_id].span(collective_name(row), "collective", begin_us, row["duration_us"], args)
        else:
            tracks[comm_id].instant(collective_name(row), "collective", begin_us, args)
