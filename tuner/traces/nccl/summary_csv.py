"""CSV with one row per collective and size: TraceLens's reports, nccl-tests' tables, summaries with such columns.

Columns may have any order and case. A row's time is mostly a mean over calls; only columns in microseconds are read as
times. These tables do not name settings; a table with columns for them is of another format.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ....agent.nccl.catalog import find_collective
from ....store.records import Collective, Observation, TimingSource
from ..csv_rows import cells_of, numbered_rows, value_in
from ..left_out import LeftOut
from ..rank_count import MAX_RANKS, Implied, implied_ranks, rank_count
from ..records import (
    BLOCK_ROWS,
    MAX_BYTES,
    Block,
    SequenceNumbers,
    Summary,
    blocks_of,
    communicator_id,
    element_bytes,
    sized_call,
)
from .nccl_tests_runs import contradiction, fits, is_right, named_in

_NAMES: Final = {
    "collective": ("collective", "collective_name", "coll", "operation", "op", "test"),
    "bytes": ("size_bytes", "message_bytes", "msg_size_bytes", "msg_bytes", "bytes", "size_b"),
    "in": ("in_msg_nelems",),
    "out": ("out_msg_nelems",),
    "dtype": ("dtype", "datatype", "type"),
    "time": (
        "comm_latency_mean", "comm_latency", "time_us", "latency_us", "duration_us", "mean_us", "avg_us",
        "mean_time_us", "avg_time_us", "avg_latency_us", "mean_latency_us", "median_us", "median_time_us",
    ),
    "ranks": ("group_size", "ranks", "n_ranks", "nranks", "world_size", "num_ranks", "gpus", "n_gpus", "num_gpus"),
    "each": ("gpusperrank",),
    "redop": ("redop",),
    "nodes": ("nodes", "n_nodes", "nnodes", "num_nodes"),
    "calls": ("count", "n_calls", "calls"),
}  # fmt: skip
_TABLE: Final = re.compile(
    r"(?:(?:out_?of_?place|out_?place|oop|(?P<before>in_?place|ip))_?)?(?P<what>time|algbw|busbw|wrong|error)"
    r"(?:_(?:us|gb_?p?s))?(?:_?(?:out_?of_?place|oop|(?P<after>in_?place|ip|[12])))?(?:_(?:us|gb_?p?s))?"
)
"""Names of nccl-tests' columns in CSV files made from its tables; times are microseconds."""
_TABLE_SIZES: Final = ("size", "size_b", "size_bytes", "size_byte")
_SETTING: Final = {"algorithm", "algo", "protocol", "proto", "channels", "nchannels", "n_channels"}
MEANS: Final = "its rows are means over calls: each is one measurement, and no interval knows of their spread"
_MOST_US: Final = 1e12


class _Side(NamedTuple):
    """Columns of out-of-place or in-place calls; -1: there is none."""

    time: int
    algbw: int = -1
    busbw: int = -1
    wrong: int = -1


class _Columns(NamedTuple):
    """Indices of the columns."""

    named: dict[str, int]
    sides: tuple[_Side, ...]


def matches(begin: bytes) -> bool:
    """Whether the first line has a collective, its size, a time in microseconds and no setting; or is nccl-tests'."""
    line = begin.split(b"\n", 1)[0].decode("utf-8", "replace")
    return "," in line and _columns(cells_of(line.strip())) is not None


def _columns(header: Sequence[str]) -> _Columns | None:
    names = [re.sub(r"[\W_]+", "_", name.strip().lower()).strip("_") for name in header]
    if _SETTING.intersection(names):
        return None
    found = {
        what: names.index(known)
        for what, spellings in _NAMES.items()
        if (known := next((one for one in spellings if one in names), None)) is not None
    }
    sides: list[dict[str, int]] = [{}, {}]
    for place, cell in enumerate(map(_TABLE.fullmatch, names)):
        if cell is not None:
            what = "wrong" if cell["what"] == "error" else cell["what"]
            is_second = bool(cell["before"] or cell["after"]) or what in sides[0]
            sides[is_second].setdefault(what, place)
    size = next((names.index(one) for one in _TABLE_SIZES if one in names), None)
    if size is not None and any({"time", "busbw"} <= set(side) for side in sides):
        found.pop("calls", None)  # the column `count` has elements in nccl-tests' tables
        return _Columns(found | {"bytes": size}, tuple(_Side(**side) for side in sides if "time" in side))
    sized = "bytes" in found or ("dtype" in found and ("in" in found or "out" in found))
    return _Columns(found, (_Side(found["time"]),)) if sized and {"collective", "time"} <= set(found) else None


class _Row(NamedTuple):
    """One time of a row."""

    collective: Collective
    message_bytes: int
    n_ranks: int
    n_nodes: int
    datatype: str | None
    duration_us: float
    algbw: float
    busbw: float


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """One record per row, or two of a row with times out of place and in place."""
    rows, counters = _rows(path, summary), SequenceNumbers()
    while piece := list(itertools.islice(rows, BLOCK_ROWS)):
        yield from blocks_of(_observation(row, counters) for row in _with_ranks(piece, path, summary))


def _with_ranks(rows: list[_Row], path: Path, summary: Summary) -> Iterator[_Row]:
    """The rows, grouped by stated ranks, with the ranks that agree with their bandwidths."""
    groups: dict[tuple[int, Collective], list[_Row]] = {}
    for row in rows:
        groups.setdefault((row.n_ranks, row.collective), []).append(row)
    implied = {
        key: implied_ranks(key[1], [row.algbw for row in group], [row.busbw for row in group])
        for key, group in groups.items()
    }
    counts = {}
    for stated in dict.fromkeys(row.n_ranks for row in rows):
        ranges = [one for (ranks, _), one in implied.items() if ranks == stated]
        common = Implied(max(one.least for one in ranges), min(one.most for one in ranges))
        for key in groups:
            if key[0] == stated:  # without stated ranks, two runs may follow each other
                counts[key] = rank_count(stated, common if common.least <= common.most else implied[key])
    for count in dict.fromkeys(counts.values()):
        summary.note_ranks(count, path.name)
    for row in rows:
        yield row._replace(n_ranks=counts[row.n_ranks, row.collective].n_ranks)


def _rows(path: Path, summary: Summary) -> Iterator[_Row]:
    columns: _Columns | None = None
    fallback = named_in(path) or summary.collective
    for line, row in numbered_rows(path, summary):
        if columns is None:
            columns = _columns(row) or _Columns({}, ())
            summary.columns_found = ", ".join(row)
        elif columns.sides:
            yield from _rows_of(columns, row, f"in line {line} of {path.name}", fallback, summary)


def _rows_of(
    columns: _Columns, row: Sequence[str], where: str, fallback: Collective | None, summary: Summary
) -> Iterator[_Row]:
    cells = {what: row[place].strip() for what, place in columns.named.items() if place < len(row)}
    collective = find_collective(cells.get("collective", "")) if "collective" in columns.named else fallback
    if collective is None and "collective" not in columns.named:
        summary.skip(LeftOut.collective_unknown)
        return
    if collective is None:
        summary.skip(LeftOut.unknown_operation, 1, f"{value_in('collective', cells.get('collective', ''))} {where}")
        return
    if not fits(collective, cells.get("redop")):
        summary.skip(LeftOut.other_collective, 1, where)
        return
    n_ranks, n_nodes = (int(_number(cells.get(name, ""), MAX_RANKS)) for name in ("ranks", "nodes"))
    n_ranks *= int(_number(cells.get("each", "1"), MAX_RANKS))
    width = element_bytes(cells.get("dtype"))
    message_bytes: int | None = int(_number(cells.get("bytes", ""), MAX_BYTES))
    if "bytes" not in cells and width is not None:
        sides = [int(_number(cells.get(side, ""), MAX_BYTES)) * width or None for side in ("in", "out")]
        message_bytes, n_ranks = sized_call(collective, sides, {"its column": n_ranks}, summary, where)
    if not message_bytes:
        is_zero = cells.get("bytes") == "0"
        summary.skip(LeftOut.size_zero if is_zero else LeftOut.bytes_or_ranks_unknown, 1, where)
        return
    if _number(cells.get("calls", ""), _MOST_US) > 1:
        summary.note(MEANS)
    for side in columns.sides:
        time, *bandwidths, wrong = (row[place].strip() if 0 <= place < len(row) else "" for place in side)
        duration_us, (algbw, busbw) = _number(time, _MOST_US), (_number(one, _MOST_US) for one in bandwidths)
        if wrong and not is_right(wrong):
            summary.skip(LeftOut.wrong_result)
        elif not duration_us:
            summary.skip(LeftOut.row_without_time, 1, f"{value_in('time', time)} {where}")
        elif algbw and (contradicting := contradiction(message_bytes, duration_us, algbw)):
            summary.skip(LeftOut.contradicting_time, 1, f"{contradicting} {where}")
        else:
            datatype = None if width is None else cells["dtype"]
            yield _Row(collective, message_bytes, n_ranks, n_nodes, datatype, duration_us, algbw, busbw)


def _observation(row: _Row, counters: SequenceNumbers) -> Observation:
    comm_id = communicator_id("summary", row.n_ranks, row.n_nodes)
    return Observation(
        sequence=counters.next(comm_id, row.collective),
        collective=row.collective,
        message_bytes=row.message_bytes,
        n_ranks=row.n_ranks,
        n_nodes=row.n_nodes or None,
        comm_id=comm_id,
        datatype=row.datatype,
        duration_us=row.duration_us,
        timing_source=TimingSource.reported,
    )


def _number(text: str, most: float) -> float:
    """A number from 0 up to `most`; 0 for anything else."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0 < number <= most else 0.0
