"""The ranks of a trace in a timeline: each one's steps, and one track per communicator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....store.counted import counted
from ....store.errors import TraceError, UserError
from ....store.records import CommunicatorClass, Decision
from ....store.wire import FLAG_MATCHED, FLAG_TIMED
from ...traces.own.clocks import Clocks, RankTimes
from ...traces.own.jobs import OneStart, RankFile
from .events import EventFile, Track
from .named import by_field, collective_args, collective_name, draw_decisions


def draw_ranks(events: EventFile, start: OneStart, decisions: Sequence[Decision]) -> list[str]:
    """Draw all ranks, one in memory at a time; returns remarks for the user.

    Raises:
        UserError: nothing is recorded in the files.
    """
    clocks = Clocks()
    damaged = list(start.damaged)
    whole: list[tuple[RankFile, float]] = []
    earliest_us = 0.0
    for file in start.files:
        try:
            rank = RankTimes.read(file)
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
        rank = RankTimes.read(file)
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
        alone = counted(clocks.n_alone, "rank")
        remarks.append(f"{alone} without a timed collective that others share: drawn from time 0.")
    return remarks


def _draw_rank(events: EventFile, rank: RankTimes) -> None:
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
