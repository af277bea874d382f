"""The collectives of a few settled steps by rank, on one clock, with the last rank to arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ....store.counted import counted
from ....store.errors import TraceError
from ...late_ranks.waits import TOGETHER
from ...traces.own.clocks import Clocks, RankTimes, Span, is_timed
from ...traces.own.jobs import one_start
from ...traces.own.reader import trace_files
from ..replay.table import CollectiveTable

Array = NDArray[Any]

MAX_STEPS: Final = 4
MAX_RANKS: Final = 32
MAX_CALLS: Final = 4000
"""Each call takes up to a kilobyte of the page, and one or two shapes that the browser draws."""
UNKNOWN_RANK: Final = -1


@dataclass(frozen=True)
class RankCalls:
    """Collectives of these steps; times are microseconds since the first step began."""

    rows: Array
    """Records of OBSERVATION_FIELDS, shape (n,), by rank, then by begin."""
    rank: Array
    """Rank of each record, int64 (n,)."""
    begin_us: Array
    """Begin of each record, shape (n,)."""
    waited_us: Array
    """Each record's wait for the last rank, shape (n,); NaN if not all ranks recorded the call."""
    last_rank: Array
    """The last rank to arrive at each call, int64 (n,); UNKNOWN_RANK if not all ranks recorded it."""
    steps: dict[int, Span]
    """Begin and end of steps by number, for the lowest rank shown."""
    left_out: tuple[str, ...]
    """Ranks, steps or calls that are left out, in words."""


def rank_calls(table: CollectiveTable, trace: Path) -> RankCalls | str:
    """The collectives of a trace's ranks in settled steps, or the reason for having none.

    At most MAX_STEPS steps, MAX_RANKS ranks and MAX_CALLS calls are included.
    """
    steps = _settled_steps(table)
    if not len(steps):
        return "nothing in the trace was timed"
    try:
        start = one_start(trace_files(trace), table.job_id or None)
    except TraceError:
        return "only traces of `launch --log-trace` tell ranks apart"
    clocks, ranks, left_out = Clocks(), [], []
    for file in start.files:
        try:
            one = RankTimes.read(file).only(steps)
        except TraceError:
            continue  # a note of the table names it
        one.shift(clocks.offset_us(one))
        ranks.append(one)
    if clocks.n_alone:
        alone = counted(clocks.n_alone, "rank")
        left_out.append(f"{alone} without a timed collective that others share, and so with a clock of their own")
    return _bounded(ranks, steps, left_out)


def _settled_steps(table: CollectiveTable) -> Array:
    """Numbers of consecutive timed steps around the step of median length in the trace's last quarter."""
    timed = np.unique(table.rows["step"][np.isfinite(table.duration_us)])
    logged = table.steps[np.isin(table.steps["step"], timed)]
    if not len(logged):
        return timed[-MAX_STEPS:]
    tail = logged[-max(1, len(logged) // 4) :]
    middle = int(tail["step"][np.argsort(tail["duration_us"], kind="stable")[len(tail) // 2]])
    run = np.split(logged["step"], np.flatnonzero(np.diff(logged["step"].astype(np.int64)) != 1) + 1)
    around = next(one for one in run if middle in one)
    at = int(np.searchsorted(around, middle))
    first = max(0, min(at - MAX_STEPS // 2, len(around) - MAX_STEPS))
    return around[first : first + MAX_STEPS]


def _bounded(ranks: Sequence[RankTimes], steps: Array, left_out: list[str]) -> RankCalls | str:
    rows = np.concatenate([one.rows for one in ranks])
    rank = np.repeat(np.array([one.number for one in ranks]), [len(one.rows) for one in ranks])
    begin_us = np.concatenate([one.begin_us for one in ranks])
    timed = is_timed(rows)
    if not timed.any():
        return "nothing in the trace was timed"
    rows, rank, begin_us = rows[timed], rank[timed], begin_us[timed]
    waited_us, last_rank = _arrivals(rows, rank)
    shown = _most_waited_for(rank, waited_us, last_rank)
    kept = np.isin(rank, shown)
    while kept.sum() > MAX_CALLS and len(steps) > 1:
        steps = steps[:-1]
        kept &= np.isin(rows["step"], steps)
    while kept.sum() > MAX_CALLS and len(shown) > 1:
        shown = shown[:-1]
        kept &= np.isin(rank, shown)
    if len(shown) < len(ranks):
        left_out.append(f"{len(shown)} of {len(ranks):,} ranks are shown, those that others waited for the longest")
    chosen = np.flatnonzero(kept)
    if len(chosen) > MAX_CALLS:
        left_out.append(f"of {len(chosen):,} collectives the first {MAX_CALLS:,} are shown")
    chosen = chosen[:MAX_CALLS]
    chosen = chosen[np.lexsort((begin_us[chosen], rank[chosen]))]
    spans = min((one for one in ranks if one.number in shown), key=lambda one: one.number).steps
    spans = {step: span for step, span in spans.items() if step in steps}
    zero_us = min([float(begin_us[chosen].min()), *(begin for begin, _ in spans.values())])
    return RankCalls(
        rows=rows[chosen],
        rank=rank[chosen],
        begin_us=begin_us[chosen] - zero_us,
        waited_us=waited_us[chosen],
        last_rank=last_rank[chosen],
        steps={step: (begin - zero_us, end - zero_us) for step, (begin, end) in spans.items()},
        left_out=tuple(left_out),
    )


def _arrivals(rows: Array, rank: Array) -> tuple[Array, Array]:
    """How long each call (n,) waited for the last rank, and that rank (n,).

    A duration includes the wait, and all ranks leave together, so the last to arrive has the shortest.
    """
    calls = np.stack([rows[name].astype(np.uint64) for name in ("comm_id", "sequence", "collective")], axis=1)
    _, call = np.unique(calls, axis=0, return_inverse=True)
    call = call.reshape(-1)
    order = np.lexsort((rank, rows["duration_us"], call))
    first = order[np.searchsorted(call[order], np.arange(call.max() + 1))]
    known = (np.bincount(call)[call] == rows["n_ranks"]) & np.isin(rows["collective"], TOGETHER)
    waited_us = np.where(known, rows["duration_us"].astype(np.float64) - rows["duration_us"][first][call], np.nan)
    return waited_us, np.where(known, rank[first][call], UNKNOWN_RANK)


def _most_waited_for(rank: Array, waited_us: Array, last_rank: Array) -> list[int]:
    """At most MAX_RANKS ranks, those with the longest waits of others first, then by number."""
    numbers = np.unique(rank)
    late_us = {number: float(np.nansum(waited_us[last_rank == number])) for number in numbers.tolist()}
    return sorted(late_us, key=lambda number: (-late_us[number], number))[:MAX_RANKS]
