"""A trace as replay sees it: one row per collective of the job, joined over its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from store.errors import TraceError
from store.records import Collective, CommunicatorClass, DecisionKey, Observation, Phase, size_class
from tuner.traces.own import OwnTrace

Array = NDArray[Any]

UNKNOWN: Final = 255
"""`algorithm`, `protocol` or `n_channels` that the trace does not tell."""
_FLAG_MATCHED = 1
_FLAG_TIMED = 2

COLLECTIVE_DTYPE: Final = np.dtype(
    [
        ("comm_id", "<u8"),
        ("message_bytes", "<u8"),
        ("start_ns", "<i8"),
        ("duration_us", "<f4"),
        ("sequence", "<u4"),
        ("n_ranks", "<u4"),
        ("n_nodes", "<u4"),
        ("step", "<u4"),
        ("collective", "u1"),
        ("algorithm", "u1"),
        ("protocol", "u1"),
        ("n_channels", "u1"),
        ("phase", "u1"),
        ("is_default", "u1"),
    ]
)
"""NaN duration_us = not timed; n_nodes 0 = the trace does not say."""


@dataclass(frozen=True, order=True)
class Shape:
    """What a policy decides on, at the exact size: collectives of one shape are interchangeable."""

    n_ranks: int
    n_nodes: int
    collective: Collective
    phase: Phase
    message_bytes: int

    @property
    def communicator(self) -> CommunicatorClass:
        """The shape's communicator class."""
        return CommunicatorClass(self.n_ranks, self.n_nodes)

    @property
    def key(self) -> DecisionKey:
        """The decision key that this shape falls under."""
        return DecisionKey(self.communicator, self.collective, self.phase, size_class(self.message_bytes))


@dataclass(frozen=True)
class CollectiveTable:
    """A job's collectives and steps; `rows` [n] of COLLECTIVE_DTYPE in the order of each communicator."""

    rows: Array
    steps: Array
    """Rank 0's steps [m] of store.trace_format.STEP_FIELDS; empty when the trace has none."""
    job_id: str = ""
    fabric_id: str = ""
    fabric: dict[str, str | int | float | bool] = field(default_factory=dict)
    n_files: int = 1
    n_dropped: int = 0
    is_emulated: bool = False
    """True when the times are the emulated NCCL's virtual ones."""

    def shapes(self) -> tuple[list[Shape], Array]:
        """The distinct shapes, and for each row the index of its shape, int64 [n]."""
        rows = self.rows
        sizes, size_index = np.unique(rows["message_bytes"], return_inverse=True)
        wide = rows["n_ranks"].astype(np.uint64) << np.uint64(32) | rows["n_nodes"]
        worlds, world_index = np.unique(wide, return_inverse=True)
        code = world_index.astype(np.int64)
        for column, n_values in ((rows["collective"], 256), (rows["phase"], 256), (size_index, len(sizes))):
            code = code * n_values + column
        codes, index = np.unique(code, return_inverse=True)
        shapes = []
        for one in codes.tolist():
            rest, at_size = divmod(one, max(len(sizes), 1))
            rest, phase = divmod(rest, 256)
            at_world, collective = divmod(rest, 256)
            n_ranks, n_nodes = divmod(int(worlds[at_world]), 1 << 32)
            shapes.append(Shape(n_ranks, n_nodes, Collective(collective), Phase(phase), int(sizes[at_size])))
        return shapes, index


def from_own(traces: Sequence[OwnTrace]) -> CollectiveTable:
    """Join one job's ranks: a collective's duration is what its last arrival saw, the least over ranks.

    Raises:
        TraceError: the traces are of different jobs.
    """
    jobs = sorted({trace.header.job_id for trace in traces})
    if len(jobs) != 1:
        raise TraceError(f"the traces are of {len(jobs)} jobs ({', '.join(jobs[:3])})", "name one job's files")
    header = min((trace.header for trace in traces), key=lambda header: header.rank)
    records = [_usable(trace.records) for trace in traces]
    rows = _rows(np.concatenate(records))
    first = next(trace for trace in traces if trace.header.rank == header.rank)
    return CollectiveTable(
        rows=_join(rows) if len(traces) > 1 else rows,
        steps=first.steps,
        job_id=header.job_id,
        fabric_id=header.fabric_id,
        fabric=header.fabric,
        n_files=len(traces),
        n_dropped=sum(trace.n_dropped for trace in traces),
        is_emulated=header.clock == "emulated",
    )


def from_observations(
    observations: Iterable[Observation], *, fabric_id: str = "", n_nodes: int | None = None
) -> CollectiveTable:
    """A foreign trace; what it does not tell stays unknown. `n_nodes` fills in where it is silent."""

    def row(one: Observation) -> tuple[Any, ...]:
        return (
            one.comm_id,
            one.message_bytes,
            one.start_ns or 0,
            np.nan if one.duration_us is None else one.duration_us,
            one.sequence,
            one.n_ranks,
            (n_nodes or 0) if one.n_nodes is None else one.n_nodes,
            0 if one.step is None else one.step,
            one.collective,
            UNKNOWN if one.algorithm is None else one.algorithm,
            UNKNOWN if one.protocol is None else one.protocol,
            one.n_channels or 0,
            one.phase,
            one.epoch == 0,
        )

    rows = np.array([row(one) for one in observations if one.message_bytes > 0], COLLECTIVE_DTYPE)
    return CollectiveTable(
        rows=_join(rows),
        steps=np.empty(0, [("step", "<u4")]),
        fabric_id=fabric_id,
    )


def _usable(records: Array) -> Array:
    """Records of known collectives and phases that move bytes."""
    known = (records["collective"] <= max(Collective)) & (records["phase"] <= max(Phase))
    usable = known & (records["message_bytes"] > 0)
    return records if bool(usable.all()) else records[usable]


def _rows(records: Array) -> Array:
    rows = np.empty(len(records), COLLECTIVE_DTYPE)
    for name in COLLECTIVE_DTYPE.names or ():
        if name != "is_default":
            rows[name] = records[name]
    rows["is_default"] = (records["flags"] & _FLAG_MATCHED) == 0
    untimed = (records["flags"] & _FLAG_TIMED == 0) | ~(records["duration_us"] >= 0)
    rows["duration_us"][untimed] = np.nan
    return rows


def _join(rows: Array) -> Array:
    """One row per (comm_id, collective, sequence): the least known duration, the latest start."""
    order = np.lexsort((rows["sequence"], rows["collective"], rows["comm_id"]))
    ordered = rows[order]
    is_first = np.ones(len(ordered), bool)
    if len(ordered) > 1:
        before, after = ordered[:-1], ordered[1:]
        is_first[1:] = (
            (before["sequence"] != after["sequence"])
            | (before["collective"] != after["collective"])
            | (before["comm_id"] != after["comm_id"])
        )
    starts = np.flatnonzero(is_first)
    joined = ordered[starts]
    if len(starts):
        joined["duration_us"] = np.fmin.reduceat(ordered["duration_us"], starts)
        joined["start_ns"] = np.maximum.reduceat(ordered["start_ns"], starts)
    return joined[np.argsort(joined["start_ns"], kind="stable")]
