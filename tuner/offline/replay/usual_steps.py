"""The latest sequence of like steps in a trace, and the gaps between the times of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.lib.recfunctions import repack_fields
from numpy.typing import NDArray

from ....store.records import Collective, Phase
from ...advice.prediction.timeline import StreamCall
from .medians import error_of_median
from .table import CollectiveTable, Shape

Floats = NDArray[np.float64]
Kind = tuple[Collective, Phase]

MIN_STEPS: Final = 5
MAX_STEP_CALLS: Final = 3000
"""Steps with more collectives are not modelled: no framework issues that many."""
MAX_SIMULATED_CALLS: Final = 1500
"""Number of logged steps used for choosing rules, times the collectives of a step."""
_WINDOW_STEPS: Final = 32


@dataclass(frozen=True, kw_only=True)
class TimelineCall(StreamCall):
    """One collective of the step; its duration is the trace's median at this place of the step."""

    shape: Shape


@dataclass(frozen=True)
class UsualSteps:
    """Consecutive like steps: starts and durations [n_steps, n_calls], and per step its length and exposure."""

    calls: tuple[TimelineCall, ...]
    kinds: tuple[Kind, ...]
    starts_us: Floats
    durations_us: Floats
    compute_us: float
    step_us: float
    exposed_us: float
    noise_percent: float
    n_like: int

    @cached_property
    def ends_us(self) -> Floats:
        """Ends of the collectives [n_steps, n_calls]."""
        return self.starts_us + self.durations_us

    @cached_property
    def idle_and_launch_us(self) -> tuple[Floats, Floats]:
        """Median gap between each collective and its predecessor on the stream, and the same but at least 0."""
        streams = np.array([call.stream for call in self.calls])
        gaps_us = np.full(self.starts_us.shape, np.inf)
        for stream in np.unique(streams).tolist():
            members = np.flatnonzero(streams == stream)
            starts, ends = self.starts_us[:, members].ravel(), self.ends_us[:, members].ravel()
            gaps = np.full(len(starts), np.nan)
            gaps[1:] = starts[1:] - ends[:-1]
            gaps_us[:, members] = gaps.reshape(-1, len(members))
        median_us = np.nan_to_num(np.nanmedian(gaps_us[1:], axis=0), posinf=0.0)
        return median_us, np.maximum(median_us, 0.0)

    @cached_property
    def gaps(self) -> Gaps:
        """The gaps between the times of each step."""
        return Gaps(self)


Time = tuple[object, ...]
"""A time of each step: ("start", at), of a collective (n_calls: of the next step's first); ("waited", *waits), when all
of these have ended; ("computed", us, *waits), so long after that; ("sooner", time, other), the first of two times."""


class Gaps:
    """Medians and spreads over the steps of gaps between two times; results are cached, as rules share them."""

    def __init__(self, steps: UsualSteps) -> None:
        self._steps = steps
        self._at: dict[Time, Floats] = {}
        self._medians_us: dict[tuple[Time, Time], float] = {}
        self._spreads_us: dict[tuple[Time, Time], float] = {}

    def median_us(self, early: Time, late: Time) -> float:
        """Median of the gap."""
        known = self._medians_us.get((early, late))
        if known is None:
            known = self._medians_us[early, late] = _median(self._times(late) - self._times(early))
        return known

    def spread_us(self, early: Time, late: Time) -> float:
        """Median absolute deviation of the gap."""
        known = self._spreads_us.get((early, late))
        if known is None:
            apart_us = self._times(late) - self._times(early)
            known = self._spreads_us[early, late] = _median(np.abs(apart_us - self.median_us(early, late)))
        return known

    def _times(self, time: Time) -> Floats:
        known = self._at.get(time)
        if known is None:
            known = self._at[time] = self._computed(*time)
        return known

    def _computed(self, kind: object, *of: Any) -> Floats:
        starts_us = self._steps.starts_us
        if kind == "start":
            at = int(of[0])
            return starts_us[:, at] if at < len(self._steps.calls) else np.append(starts_us[1:, 0], np.nan)
        if kind == "waited":
            return np.asarray(np.max(self._steps.ends_us[:, of], axis=1))
        if kind == "computed":
            return self._times(("waited", *of[1:])) + float(of[0])
        return np.asarray(np.fmin(self._times(of[0]), self._times(of[1])))


def usual_steps(table: CollectiveTable) -> UsualSteps | str:
    """The latest consecutive steps that issue the collectives of the most frequent kind of step."""
    steps = table.steps
    known = steps[np.isfinite(steps["exposed_us"]) & (steps["duration_us"] > 0)] if len(steps) else steps
    if not len(known):
        return "the trace does not tell how much communication of its steps was exposed"
    if len(known) < MIN_STEPS:
        return f"only {len(known)} of its steps tell how much communication was exposed, {MIN_STEPS} are needed"
    if np.count_nonzero(np.isfinite(table.duration_us)) < 0.5 * len(table.duration_us):
        return "too few of its collectives are timed"
    rows, duration_us = _of_own_rank(table)
    if not len(rows):
        return "it has no collectives"
    if not bool(np.all(np.diff(rows["step"].astype(np.int64)) >= 0)):
        order = np.lexsort((rows["start_ns"], rows["step"]))
        rows, duration_us = rows[order], duration_us[order]
    first = np.flatnonzero(np.diff(rows["step"], prepend=rows["step"][:1] + 1))
    numbers, count = rows["step"][first], np.diff(first, append=len(rows))
    if int(count.max(initial=0)) > MAX_STEP_CALLS:
        return f"a step has more than {MAX_STEP_CALLS} collectives"
    signatures: dict[int, bytes] = {}
    shapes = repack_fields(rows[["comm_id", "message_bytes", "n_ranks", "n_nodes", "collective", "phase"]])
    is_whole = np.logical_and.reduceat(np.isfinite(duration_us), first) & np.isin(numbers, known["step"])
    for number, start, length in zip(
        numbers[is_whole].tolist(), first[is_whole].tolist(), count[is_whole].tolist(), strict=True
    ):
        signatures[number] = shapes[start : start + length].tobytes()
    if not signatures:
        return "no step has all of its collectives timed"
    usual, n_like = Counter(signatures.values()).most_common(1)[0]
    if n_like < MIN_STEPS:
        return f"no {MIN_STEPS} of its steps issue the same collectives"
    n_calls = len(usual) // shapes.itemsize
    n_steps = max(MIN_STEPS, min(_WINDOW_STEPS, MAX_SIMULATED_CALLS // n_calls))
    chain = latest_in_a_row([number for number, signature in signatures.items() if signature == usual], n_steps)
    if len(chain) < MIN_STEPS:
        return f"no {MIN_STEPS} like steps follow one another"
    at = dict(zip(numbers.tolist(), first.tolist(), strict=True))
    pieces = np.array([np.arange(at[number], at[number] + n_calls) for number in chain])
    durations_us = duration_us[pieces].astype(np.float64)
    in_chain = known[np.isin(known["step"], chain)]
    example = rows[pieces[0]]
    streams = {comm: stream for stream, comm in enumerate(dict.fromkeys(example["comm_id"].tolist()))}
    calls = tuple(
        TimelineCall(
            shape=Shape(
                int(row["n_ranks"]),
                int(row["n_nodes"]),
                Collective(int(row["collective"])),
                Phase(int(row["phase"])),
                int(row["message_bytes"]),
            ),
            stream=streams[int(row["comm_id"])],
            logged_us=float(np.median(durations_us[:, index])),
            logged_channels=int(np.median(rows["n_channels"][pieces[:, index]])),
        )
        for index, row in enumerate(example)
    )
    return UsualSteps(
        calls=calls,
        kinds=tuple((call.shape.collective, call.shape.phase) for call in calls),
        starts_us=rows["start_ns"][pieces] / 1e3,
        durations_us=durations_us,
        compute_us=float(np.median(in_chain["duration_us"] - in_chain["exposed_us"])),
        step_us=float(np.median(in_chain["duration_us"])),
        exposed_us=float(np.median(in_chain["exposed_us"])),
        noise_percent=100 * error_of_median(in_chain["duration_us"]),
        n_like=n_like,
    )


def _of_own_rank(table: CollectiveTable) -> tuple[NDArray[np.void], NDArray[np.float32]]:
    """The calls, and their durations, of the rank whose steps the table has.

    Calls of communicators without that rank are left out, as it does not wait for them.
    """
    if table.own_comms is None:
        return table.rows, table.duration_us
    own = np.isin(table.rows["comm_id"], table.own_comms)
    return (table.rows, table.duration_us) if bool(own.all()) else (table.rows[own], table.duration_us[own])


def latest_in_a_row(numbers: Sequence[int], n_wanted: int) -> list[int]:
    """The last `n_wanted` consecutive numbers; if no sequence is that long, the last of the longest ones."""
    ordered = np.unique(np.asarray(numbers, np.int64))
    stretches = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    enough = min(n_wanted, max(map(len, stretches)))
    latest: list[int] = [one for one in stretches if len(one) >= enough][-1].tolist()
    return latest[-n_wanted:]


def _median(values: Floats) -> float:
    """Median of the values that are not NaN; NaN if all are. np.nanmedian is much slower on few values."""
    known = np.sort(values[~np.isnan(values)], axis=None)
    middle = len(known) // 2
    return float(known[middle] + known[~middle]) / 2 if len(known) else math.nan
