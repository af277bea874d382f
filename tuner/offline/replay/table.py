"""A trace as a table: one row per collective of the job, joined over its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ....agent.nccl import fabric as fabrics
from ....agent.nccl.fabric_model import Fabric
from ....store.counted import counted
from ....store.errors import TraceError
from ....store.records import Collective, CommunicatorClass, DecisionKey, Phase, size_class
from ....store.wire import FLAG_MATCHED, FLAG_TIMED
from ...traces import Trace
from ...traces.left_out import NOT_COLLECTIVES, LeftOut
from ...traces.own.reader import RECORD_DTYPE, STEP_DTYPE, OwnTrace
from ...traces.records import FLAG_DEFAULT, FLAG_FORCED

Array = NDArray[Any]

UNKNOWN: Final = 255
"""An `algorithm`, `protocol` or `n_channels` that the trace does not have."""
_UNKNOWN_STEP = 0xFFFFFFFF
"""Also an unknown rank."""
MAX_LOST: Final = 0.01
"""Share of a foreign trace's records that may be lost by joins with calls of another size."""
_ONE_SIZE: Final = (Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce, Collective.broadcast)
"""Collectives whose bytes are the same on all ranks."""


@dataclass(frozen=True, order=True)
class Shape:
    """The collectives that a policy decides on together; they have one exact size."""

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
        """The decision key of this shape."""
        return DecisionKey(self.communicator, self.collective, self.phase, size_class(self.message_bytes))


@dataclass(frozen=True)
class CollectiveTable:
    """A job's collectives and steps."""

    rows: Array
    """The plugin's records [n] (OBSERVATION_FIELDS), one per collective; n_nodes 0 = unknown."""
    duration_us: Array
    """float32 [n], NaN = not timed."""
    is_default: Array
    """bool [n]: NCCL chose the setting."""
    steps: Array
    """Rank 0's steps [m] of zerotune.store.trace_format.STEP_FIELDS; empty if the trace has none."""
    job_id: str = ""
    fabric_id: str = ""
    fabric: dict[str, str | int | float | bool] = field(default_factory=dict)
    n_files: int = 1
    n_dropped: int = 0
    """Records of our own trace that were lost before they were logged."""
    n_logged: int = 0
    """Records in the files of our own trace."""
    is_emulated: bool = False
    """True if the times are the emulated NCCL's virtual ones."""
    n_records: int = 0
    """Records of a foreign trace that are in `rows`, single or joined."""
    left_out: dict[LeftOut, int] = field(default_factory=dict)
    """Records of a foreign trace that are not in `rows`, by reason."""
    n_partial: int = 0
    """Collectives of our own trace that are not in `rows`, since some ranks did not record them."""
    is_silent_on_choices: bool = False
    """True if a foreign trace does not say who chose its settings, which then count as NCCL's own choice."""
    notes: tuple[str, ...] = ()
    """Other notes of the reader."""
    own_comms: Array | None = None
    """Communicators of the rank that recorded `steps`; None if the trace does not name that rank."""
    described: Fabric | None = None
    """The fabric that the user named; None: the one in `fabric`, if any."""

    @cached_property
    def machine(self) -> Fabric | None:
        """The described fabric; None: it is not described."""
        name = self.fabric.get("emulated")
        return self.described or (fabrics.load(name) if isinstance(name, str) and name else None)

    @property
    def n_left_out(self) -> int:
        """Collectives (in a foreign trace: records) that ran and are not in `rows`."""
        return self.n_partial + sum(n for reason, n in self.left_out.items() if reason not in NOT_COLLECTIVES)

    @property
    def left_out_percent(self) -> float:
        """Share of `n_left_out` in all that ran."""
        return 100 * self.n_left_out / max(1, self.n_left_out + (self.n_records or len(self.rows)))

    @cached_property
    def shapes(self) -> tuple[list[Shape], Array]:
        """The distinct shapes, and for each row the index of its shape, int64, shape (n,)."""
        rows = self.rows
        sizes, size_index = numbered(rows["message_bytes"])
        wide = rows["n_ranks"].astype(np.uint64) << np.uint64(32) | rows["n_nodes"]
        worlds, world_index = numbered(wide)
        code = world_index
        for column, n_values in ((rows["collective"], 256), (rows["phase"], 256), (size_index, len(sizes))):
            code = code * n_values + column
        codes, index = numbered(code)
        shapes = []
        for one in codes.tolist():
            rest, at_size = divmod(one, max(len(sizes), 1))
            rest, phase = divmod(rest, 256)
            at_world, collective = divmod(rest, 256)
            n_ranks, n_nodes = divmod(int(worlds[at_world]), 1 << 32)
            shapes.append(Shape(n_ranks, n_nodes, Collective(collective), Phase(phase), int(sizes[at_size])))
        return shapes, index


def numbered(values: Array) -> tuple[Array, Array]:
    """The distinct values in order, and for each value its place among them, int64.

    np.unique's own inverse sorts all values; looking up a few distinct ones takes half the time.
    """
    values = np.ascontiguousarray(values)
    distinct = np.unique(values)
    return distinct, np.searchsorted(distinct, values)


def from_own(traces: Sequence[OwnTrace]) -> CollectiveTable:
    """Join one job's ranks: a collective's duration is that of the last rank to arrive, the shortest."""
    jobs = sorted({trace.header.job_id for trace in traces})
    if len(jobs) != 1:
        raise TraceError(f"the traces are of {len(jobs)} jobs ({', '.join(jobs[:3])})", "name one job's files")
    header = min((trace.header for trace in traces), key=lambda header: header.rank)
    records = [_completed(_usable(trace.records)) for trace in traces]
    rows, n_partial = _concatenated(records), 0
    if len(traces) > 1:
        rows, n_reports = _join(rows)
        is_whole = _reported_by_all(rows["comm_id"], n_reports)
        rows, n_partial = rows[is_whole], int(np.count_nonzero(~is_whole))
    first = next(trace for trace in traces if trace.header.rank == header.rank)
    return _table(
        rows,
        steps=first.steps,
        job_id=header.job_id,
        fabric_id=header.fabric_id,
        fabric=header.fabric,
        n_files=len(traces),
        n_logged=sum(len(trace.records) for trace in traces),
        n_dropped=sum(trace.n_dropped for trace in traces),
        is_emulated=header.clock == "emulated",
        n_partial=n_partial,
        notes=tuple(_notes_of(traces, header.n_ranks, n_partial)),
        own_comms=np.unique(first.records["comm_id"]),
    )


def _notes_of(traces: Sequence[OwnTrace], n_ranks: int, n_partial: int) -> Iterator[str]:
    """Notes on records that one job's files lack."""
    cut = [trace.path.name for trace in traces if not trace.ended]
    if cut:
        more = f" and {len(cut) - 3} more" if len(cut) > 3 else ""
        yield (
            f"{', '.join(cut[:3])}{more} ({len(cut)} of {counted(len(traces), 'file')}) without an end mark: the"
            " process was killed or the file was cut. What stands before the cut was replayed; up to a second before"
            " it is missing."
        )
    if len(traces) < n_ranks:
        yield (
            f"Files of {len(traces)} of {n_ranks} ranks: durations may include waiting for the others, and no interval"
            " knows of that."
        )
    if n_partial:
        yield f"Left out: {n_partial:,} collectives that fewer ranks recorded than others of their communicator."


def _reported_by_all(comm_id: Array, n_reports: Array) -> Array:
    """Whether each collective has records of as many ranks as any on its communicator, shape (n,).

    If a rank's record is missing, the duration may include waiting for that rank.
    """
    comms, comm = np.unique(comm_id, return_inverse=True)
    most = np.zeros(len(comms), np.int64)
    np.maximum.at(most, comm, n_reports)
    return np.asarray(n_reports == most[comm])


def from_trace(trace: Trace, *, fabric: Fabric | None = None) -> CollectiveTable:
    """A foreign trace's table; missing fields stay unknown. `fabric` gives the number of nodes of its ranks.

    Each row of measurements is a separate call: they are not joined.

    Raises:
        TraceError: the ranks' records do not fit together, or several settings would count as NCCL's own choice.
    """
    blocks, files = [], []
    for block in trace.blocks():
        blocks.append(block)
        files.append(np.full(len(block), trace.paths.index(trace.path)))
    rows = _concatenated(blocks) if blocks else np.empty(0, RECORD_DTYPE)
    if blocks and trace.is_measurements:
        _refuse_several_choices(rows, np.concatenate(files), trace.paths)
    n_read = len(rows)
    rows = _usable(rows)
    n_usable = len(rows)
    rows["step"][rows["step"] == _UNKNOWN_STEP] = 0
    if fabric is not None:
        for n_ranks in np.unique(rows["n_ranks"][rows["n_nodes"] == 0]).tolist():
            silent = (rows["n_nodes"] == 0) & (rows["n_ranks"] == n_ranks)
            rows["n_nodes"][silent] = fabric.n_nodes(range(n_ranks))
    joined = rows if trace.is_measurements else _joined_alike(rows)
    facts, left_out = trace.summary.facts, trace.summary.unusable.copy()
    left_out[LeftOut.unknown_kind] += n_read - n_usable
    return _table(
        joined,
        steps=np.empty(0, STEP_DTYPE),
        job_id=str(facts.get("job_id", "")),
        fabric_id=str(facts.get("fabric_id", "")),
        n_files=trace.summary.n_files,
        n_records=n_usable,
        left_out=dict((+left_out).most_common()),
        is_silent_on_choices=bool((rows["flags"] & (FLAG_DEFAULT | FLAG_FORCED) == 0).any()),
        notes=tuple(f"{note}." for note in trace.summary.remarks),
    )


def _usable(records: Array) -> Array:
    """Records of known collectives and phases that move bytes."""
    known = (records["collective"] <= max(Collective)) & (records["phase"] <= max(Phase))
    usable = known & (records["message_bytes"] > 0)
    return records if bool(usable.all()) else records[usable]


def _completed(records: Array) -> Array:
    """One record per collective: the plugin logs a decision, and then the timed collective with NCCL's number.

    Decisions count as collectives only in a trace without times.
    """
    is_timed = records["flags"] & FLAG_TIMED != 0
    return records[is_timed] if is_timed.any() and not is_timed.all() else records


def _concatenated(blocks: Sequence[Array]) -> Array:
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def _known_durations(records: Array) -> Array:
    duration_us = np.array(records["duration_us"])
    is_timed = (records["flags"] & FLAG_TIMED != 0) & (duration_us >= 0)
    duration_us[~is_timed] = np.nan
    return duration_us


def _table(rows: Array, **facts: Any) -> CollectiveTable:
    is_default = (rows["flags"] & (FLAG_MATCHED | FLAG_FORCED)) == 0
    return CollectiveTable(rows=rows, duration_us=_known_durations(rows), is_default=is_default, **facts)


def _refuse_several_choices(rows: Array, file: Array, paths: Sequence[Path]) -> None:
    """Refuse measurements of unknown settings if several runs may have had several settings.

    Unknown settings count as NCCL's own choice, and NCCL chooses one algorithm and protocol at a size.
    """
    is_silent = rows["flags"] & (FLAG_DEFAULT | FLAG_FORCED) == 0
    rows, file = rows[is_silent], file[is_silent]
    is_known = rows["algorithm"] != UNKNOWN
    run = np.where(is_known, 0, file * np.uint64(2) + np.uint64(1)).astype(np.uint64) << np.uint64(20)
    run += np.where(is_known, rows["algorithm"].astype(np.uint64) << np.uint64(8) | rows["protocol"], 0)
    comm_id = np.where(is_known, 0, rows["comm_id"])
    place = [rows[name] for name in ("collective", "message_bytes", "n_ranks", "n_nodes", "datatype")]
    order = np.lexsort([run, comm_id, *place])
    changes = np.logical_or(*(column[order][1:] != column[order][:-1] for column in (run, comm_id)))
    is_same_place = np.logical_and.reduce([column[order][1:] == column[order][:-1] for column in place])
    at = np.flatnonzero(changes & is_same_place)
    if len(at):
        one = rows[order[at[0]]]
        named = ", ".join(paths[int(number)].name for number in np.unique(file[order[at[0] : at[0] + 2]]))
        raise TraceError(
            f"{named}: several runs measured {Collective(one['collective']).name} of {int(one['message_bytes']):,}"
            f" bytes on {int(one['n_ranks'])} ranks, and none says whether NCCL chose its setting: they cannot all"
            " count as its own choice",
            "name one run's file; or import each with --default or --setting, and replay what"
            " `zerotune store export --to measurements` writes",
        )


def _joined_alike(rows: Array) -> Array:
    """One row per collective of a foreign trace.

    If a format gives several calls of one rank the same number, they are joined with others' in their order.
    """
    order, is_first = _ordered(rows, ("rank", "sequence", "collective", "comm_id"))
    is_first |= rows["rank"][order] == _UNKNOWN_STEP
    if not is_first.all():
        places = np.arange(len(rows))
        repeat = np.empty(len(rows), np.int64)
        repeat[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
        by_call = np.lexsort([repeat, *(rows[name] for name in ("sequence", "collective", "comm_id"))])
        rows = rows[by_call]
        begins = _begins(rows, ("sequence", "collective", "comm_id"))
        begins[1:] |= np.diff(repeat[by_call]) != 0
        rows["sequence"] = np.cumsum(begins)
    order, is_first = _ordered(rows, ("sequence", "collective", "comm_id"))
    n_bytes = rows["message_bytes"][order]
    is_other = n_bytes != n_bytes[np.flatnonzero(is_first)[np.cumsum(is_first) - 1]]
    n_lost = int(np.count_nonzero(is_other & np.isin(rows["collective"][order], _ONE_SIZE)))
    if n_lost > MAX_LOST * len(rows):
        raise TraceError(
            f"of {len(rows):,} records, {n_lost:,} ({n_lost / len(rows):.1%}) would be joined with calls of another"
            f" size on other ranks, and at most {MAX_LOST:.0%} may be: the ranks' files do not fit together",
            "name the whole files of one run, or one rank's alone",
        )
    return _join(rows)[0]


def _ordered(rows: Array, names: tuple[str, ...]) -> tuple[Array, Array]:
    """An order by the columns, the last column first; and which rows of it differ from the row before."""
    order = np.lexsort([rows[name] for name in names])
    return order, _begins(rows[order], names)


def _begins(ordered: Array, names: tuple[str, ...]) -> Array:
    begins = np.ones(len(ordered), bool)
    for at, name in enumerate(names):
        differs = ordered[name][1:] != ordered[name][:-1]
        begins[1:] = differs if not at else begins[1:] | differs
    return begins


def _join(rows: Array) -> tuple[Array, Array]:
    """One row per (comm_id, collective, sequence), and the number of records that it was joined from, shape (m,).

    A row's duration is the shortest known one, and its start is the beginning of that duration.
    """
    ordered = rows[np.lexsort((rows["rank"], rows["sequence"], rows["collective"], rows["comm_id"]))]
    is_first = _begins(ordered, ("sequence", "collective", "comm_id"))
    starts = np.flatnonzero(is_first)
    joined = ordered[starts]
    if len(starts):
        least_us = np.fmin.reduceat(_known_durations(ordered), starts)
        is_timed = np.isfinite(least_us)
        joined["duration_us"] = np.where(is_timed, least_us, -1.0)
        joined["flags"] = joined["flags"] & (255 - FLAG_TIMED) | is_timed * np.uint8(FLAG_TIMED)
        # One rank's clock is used, as clocks of nodes differ: its end less the last arrival's duration.
        own_us = _known_durations(joined_own := ordered[starts])
        waited_us = np.nan_to_num(own_us - least_us)
        joined["start_ns"] = joined_own["start_ns"] + np.maximum(waited_us * 1e3, 0).astype(np.int64)
    order = np.argsort(joined["start_ns"], kind="stable")
    return joined[order], np.diff(starts, append=len(ordered))[order]


