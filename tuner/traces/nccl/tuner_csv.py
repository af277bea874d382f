"""NVIDIA's tuner CSV, as measured input: one setting with its cost per row.

Columns: collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff,cost_metric,
bandwidth_gbps,latency_us; `size_bytes` is the total. Algorithm `default` is NCCL's own choice, whatever protocol and
channels the row has, and so is a row without algorithm and protocol. `latency_us`, if given, is the measured time.
`cost_metric` (anything that its author minimised) and `bandwidth_gbps` (of bytes per rank or in total) are not read as
times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from ....agent.nccl.catalog import find_collective, parse_algorithm, parse_protocol
from ....store.errors import TraceError, UserError
from ....store.records import Algorithm, Protocol, TimingSource
from ....store.wire import FLAG_TIMED
from ..csv_rows import header_cells, numbered_rows, value_in
from ..files import head
from ..left_out import LeftOut
from ..records import FLAG_DEFAULT, FLAG_FORCED, UNKNOWN_U1, Block, Summary, empty_block
from ..refused import TUNER_REQUIRED, Refusal, wrong_with

_Name = TypeVar("_Name", Algorithm, Protocol)
_NCCLS_CHOICE: Final = "default"
_NOTHING: Final = ("", _NCCLS_CHOICE, "none", "-1")
_MOST_CHANNELS: Final = 64
_MOST_RANKS: Final = 1 << 24
_MOST_US: Final = 1e12
_MOST_BYTES: Final = 1 << 51
_ROWS_AT_ONCE: Final = 8192


def matches(begin: bytes) -> bool:
    """Whether the header line, perhaps a comment, has the bytes and most other required columns, in any order."""
    for line in begin.splitlines():
        if _is_header(line.decode("utf-8", "replace")):
            return True
        if line.strip() and not line.lstrip().startswith(b"#"):
            return False
    return False


def _is_header(line: str) -> bool:
    names = set(header_cells(line))
    return "size_bytes" in names and len(names.intersection(TUNER_REQUIRED)) >= len(TUNER_REQUIRED) - 1


class _Row(NamedTuple):
    """A record; its fields have the names of a block's columns."""

    collective: int
    algorithm: int
    protocol: int
    message_bytes: float
    n_ranks: float
    n_nodes: float
    n_channels: float
    duration_us: float
    flags: int


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """One record per row; rows without `latency_us` have no duration."""
    rows = _rows(path, summary)
    while piece := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        block = empty_block(len(piece))
        for name, values in zip(_Row._fields, zip(*piece, strict=True), strict=True):
            block[name] = values
        block["rank"] = 0
        block["timing_source"] = [TimingSource.reported if row.duration_us > 0 else TimingSource.none for row in piece]
        yield block


def _rows(path: Path, summary: Summary) -> Iterator[_Row]:
    columns = _columns_in_comment(path)
    for line, cells in numbered_rows(path, summary):
        where = f"line {line} of {path.name}"
        if columns is None:
            columns = _columns(",".join(cells), path, line)
        elif len(cells) <= max(columns.values()):
            summary.skip(LeftOut.few_columns, 1, where)
        else:
            row = _row({name: cells[place] for name, place in columns.items()})
            if isinstance(row, _Row):
                yield row
            else:
                reason, name = row
                summary.skip(reason, 1, f"{value_in(name, cells[columns[name]])} in {where}")
    if columns is None:
        raise TraceError(f"{path} has no header", "the first line names the columns")


def _columns_in_comment(path: Path) -> dict[str, int] | None:
    """The columns that a comment before the first row names; None if none does."""
    columns = None
    for number, text in enumerate(head(path).decode("utf-8", "replace").splitlines(), start=1):
        if text.startswith("#") and _is_header(text):
            columns = _columns(text.strip(), path, number)
        elif text.strip() and not text.startswith("#"):
            break
    return columns


def _columns(header: str, path: Path, line: int) -> dict[str, int]:
    columns = {name: index for index, name in enumerate(header_cells(header))}
    missing = [name for name in TUNER_REQUIRED if name not in columns]
    if missing:
        unlike = Refusal(f"lacks the column {missing[0]} (line {line})", "docs/reference/formats.md lists the columns")
        wrong = wrong_with(header, line) or unlike
        raise TraceError(f"{path} {wrong.what}", wrong.remedy)
    return columns


def _row(cells: dict[str, str]) -> _Row | tuple[LeftOut, str]:
    """A row's values; if they are impossible, the reason and the column."""
    names = {name: cells[name].strip().lower() for name in ("algorithm", "protocol")}
    collective, algorithm = find_collective(cells["collective"]), _parsed(parse_algorithm, names["algorithm"])
    protocol = _parsed(parse_protocol, names["protocol"])
    is_default = names["algorithm"] == _NCCLS_CHOICE or all(name in _NOTHING for name in names.values())
    n_bytes, n_channels, n_nodes, n_ranks, duration_us = (
        _number(cells.get(name, "")) for name in ("size_bytes", "channels", "nodes", "ranks", "latency_us")
    )
    checks = (
        (collective is not None, LeftOut.unknown_name, "collective"),
        (is_default or algorithm is not None, LeftOut.unknown_name, "algorithm"),
        (is_default or protocol is not None, LeftOut.unknown_name, "protocol"),
        (0 < n_bytes < math.inf and n_bytes.is_integer(), LeftOut.unknown_name, "size_bytes"),
        (not math.isinf(duration_us), LeftOut.unknown_name, "latency_us"),
        # Read as "channels unknown", the row would look like a measurement of the algorithm and protocol alone.
        (is_default or _is_count(n_channels, _MOST_CHANNELS), LeftOut.impossible_channels, "channels"),
        (_is_count(n_ranks, _MOST_RANKS), LeftOut.impossible_ranks_or_nodes, "ranks"),
        (_is_count(n_nodes, _MOST_RANKS), LeftOut.impossible_ranks_or_nodes, "nodes"),
        (math.isnan(duration_us) or 0 < duration_us < _MOST_US, LeftOut.impossible_time, "latency_us"),
    )
    for is_right, reason, name in checks:
        if not is_right:
            return reason, name
    assert collective is not None
    is_named, is_timed = algorithm is not None and protocol is not None, duration_us > 0
    return _Row(
        collective,
        algorithm if is_named and algorithm is not None else UNKNOWN_U1,
        protocol if is_named and protocol is not None else UNKNOWN_U1,
        min(n_bytes, _MOST_BYTES),
        n_ranks if n_ranks > 0 else 0,
        n_nodes if n_nodes > 0 else 0,
        n_channels if 0 < n_channels <= _MOST_CHANNELS and n_channels.is_integer() else 0,
        duration_us if is_timed else -1.0,
        (FLAG_TIMED if is_timed else 0) | (FLAG_DEFAULT if is_default else FLAG_FORCED),
    )


def _parsed(parse: Callable[[str], _Name], text: str) -> _Name | None:
    """The algorithm or protocol of this name; None if there is none."""
    try:
        return None if text in _NOTHING else parse(text)
    except UserError:
        return None


def _is_count(value: float, most: int) -> bool:
    """Whether the text is a whole number from 0 to `most`, or empty (-1 means empty, too)."""
    return math.isnan(value) or (-1 <= value <= most and value.is_integer())


def _number(text: str) -> float:
    """The number in a cell; NaN for an empty cell, infinity for other text."""
    if text.strip().lower() in _NOTHING:
        return math.nan
    try:
        number = float(text)
    except ValueError:
        return math.inf
    # Python also reads 1_024 and digits of other scripts, which tables do not mean.
    is_plain = text.isascii() and "_" not in text and not math.isnan(number)
    return number if is_plain else math.inf
