"""CSV with one row per collective and size: TraceLens's reports of collectives, and summaries with such columns.

Names of columns are taken in any order and case. A row's time is what its column says, mostly a mean over calls; only
columns in microseconds are times. Which setting ran such a table does not say: one with columns for it is another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from zerotune.agent.nccl.catalog import find_collective
from zerotune.store.records import Observation, TimingSource
from zerotune.tuner.traces.csv_rows import cells_of, csv_chunks, numbered, rows_of, value_in
from zerotune.tuner.traces.left_out import LeftOut
from zerotune.tuner.traces.records import (
    MAX_BYTES,
    Block,
    SequenceNumbers,
    Summary,
    blocks_of,
    communicator_id,
    datatype_bytes,
    datatype_index,
    total_bytes,
)

_NAMES: Final = {
    "collective": ("collective", "collective name", "coll", "collective_name", "operation", "op"),
    "bytes": ("size_bytes", "message_bytes", "msg_size_bytes", "msg_bytes", "bytes", "size (b)", "size(b)", "size_b"),
    "in": ("in msg nelems",),
    "out": ("out msg nelems",),
    "dtype": ("dtype", "datatype", "type"),
    "time": (
        "comm_latency_mean", "comm_latency", "time_us", "time (us)", "time(us)", "latency_us", "duration_us", "mean_us",
        "avg_us", "mean_time_us", "avg_time_us", "avg_latency_us", "mean_latency_us", "median_us", "median_time_us",
    ),
    "ranks": ("group size", "ranks", "n_ranks", "nranks", "world_size", "num_ranks", "gpus", "n_gpus", "num_gpus"),
    "nodes": ("nodes", "n_nodes", "nnodes", "num_nodes"),
    "calls": ("count", "n_calls", "calls"),
}  # fmt: skip
_SETTING: Final = {"algorithm", "algo", "protocol", "proto", "channels", "nchannels", "n_channels"}
MEANS: Final = "its rows are means over calls: each is one measurement, and no interval knows of their spread"
_MOST_US: Final = 1e12
_MOST_RANKS: Final = 1 << 24


def matches(begin: bytes) -> bool:
    """The first line names a collective, its size and a time in microseconds, and no setting."""
    line = begin.split(b"\n", 1)[0].decode("utf-8", "replace")
    return "," in line and _columns(cells_of(line.strip())) is not None


def _columns(header: Sequence[str]) -> dict[str, int] | None:
    names = [name.strip().lower() for name in header]
    found = {
        what: names.index(known)
        for what, spellings in _NAMES.items()
        if (known := next((one for one in spellings if one in names), None)) is not None
    }
    sized = "bytes" in found or ("dtype" in found and ("in" in found or "out" in found))
    return found if sized and {"collective", "time"} <= set(found) and not _SETTING.intersection(names) else None


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """One record per row."""
    yield from blocks_of(_observations(path, summary))


def _observations(path: Path, summary: Summary) -> Iterator[Observation]:
    columns: dict[str, int] | None = None
    counters = SequenceNumbers()
    for first_line, chunk in csv_chunks(path, summary):
        for line, row in numbered(rows_of(chunk, path), first_line):
            if columns is None:
                columns = _columns(row) or {}
                summary.columns_found = ", ".join(row)
            elif row and columns:
                cells = {what: row[place].strip() for what, place in columns.items() if place < len(row)}
                where = f"in line {line} of {path.name}"
                found = _observation(cells, where, counters, summary)
                if found is not None:
                    yield found


def _observation(cells: dict[str, str], where: str, counters: SequenceNumbers, summary: Summary) -> Observation | None:
    collective = find_collective(cells.get("collective", ""))
    if collective is None:
        summary.skip(LeftOut.unknown_operation, 1, f"{value_in('collective', cells.get('collective', ''))} {where}")
        return None
    n_ranks, n_nodes = (int(_number(cells.get(name, ""), _MOST_RANKS)) for name in ("ranks", "nodes"))
    index = datatype_index(cells.get("dtype", ""))
    message_bytes: int | None = int(_number(cells.get("bytes", ""), MAX_BYTES))
    if "bytes" not in cells and index is not None:
        width = datatype_bytes(index) or 0
        in_bytes, out_bytes = (int(_number(cells.get(side, ""), MAX_BYTES)) * width or None for side in ("in", "out"))
        message_bytes = total_bytes(collective, in_bytes, out_bytes, n_ranks)
    if not message_bytes:
        summary.skip(LeftOut.bytes_or_ranks_unknown, 1, where)
        return None
    duration_us = _number(cells.get("time", ""), _MOST_US)
    if not duration_us:
        summary.skip(LeftOut.row_without_time, 1, f"{value_in('time', cells.get('time', ''))} {where}")
        return None
    if _number(cells.get("calls", ""), _MOST_US) > 1:
        summary.note(MEANS)
    comm_id = communicator_id("summary", n_ranks, n_nodes)
    return Observation(
        sequence=counters.next(comm_id, collective),
        collective=collective,
        message_bytes=message_bytes,
        n_ranks=n_ranks,
        n_nodes=n_nodes or None,
        comm_id=comm_id,
        datatype=None if index is None else cells["dtype"],
        duration_us=duration_us,
        timing_source=TimingSource.reported,
    )


def _number(text: str, most: float) -> float:
    """A number from 0 up to `most`; 0 for anything else."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0 < number <= most else 0.0
