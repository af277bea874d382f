"""NVIDIA's tuner CSV, as measured input: one setting with its cost per row.

Columns: collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff,cost_metric,
bandwidth_gbps,latency_us; `size_bytes` is the total. Algorithm `default` is NCCL's own choice, whatever the row says
of protocol and channels, and so is a row that names neither algorithm nor protocol. `latency_us`, where given, is
the measured time. `cost_metric` (anything that its author minimised) and `bandwidth_gbps` (of bytes per rank or in
total) are not read as times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zerotune.agent.nccl.catalog import find_collective, parse_algorithm, parse_protocol
from zerotune.store.errors import TraceError, UserError
from zerotune.store.records import TimingSource
from zerotune.store.wire import FLAG_TIMED
from zerotune.tuner.traces.columns import Fields, Floats, Integers
from zerotune.tuner.traces.csv_rows import csv_chunks, header_cells, line_of, rows_of, value_in
from zerotune.tuner.traces.left_out import LeftOut
from zerotune.tuner.traces.near_misses import TUNER_REQUIRED, wrong_with
from zerotune.tuner.traces.records import (
    FLAG_DEFAULT,
    FLAG_FORCED,
    MAX_EXAMPLES,
    UNKNOWN_U1,
    Block,
    Summary,
    empty_block,
)
from zerotune.tuner.traces.refused import Refusal

_NAMES: Final = ("collective", "algorithm", "protocol")
_NUMBERS: Final[tuple[str, ...]] = ("size_bytes", "channels", "nodes", "ranks", "latency_us")
_NCCLS_CHOICE: Final = "default"
_NOTHING: Final = ("", _NCCLS_CHOICE, "none", "-1")
_MOST_CHANNELS: Final = 64
_MOST_RANKS: Final = 1 << 24
_MOST_US: Final = 1e12


def matches(begin: bytes) -> bool:
    """The header line, which may be a comment, names the bytes and most of what else is required, in any order."""
    for line in begin.splitlines():
        if _is_header(line.decode("utf-8", "replace")):
            return True
        if line.strip() and not line.lstrip().startswith(b"#"):
            return False
    return False


def _is_header(line: str) -> bool:
    names = set(header_cells(line))
    return "size_bytes" in names and len(names.intersection(TUNER_REQUIRED)) >= len(TUNER_REQUIRED) - 1


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """One record per row; rows without `latency_us` have no duration."""
    columns: dict[str, int] | None = None
    for first_line, chunk in csv_chunks(path, summary):
        line, text = first_line, chunk
        if columns is None:
            columns, n_bytes = _header(chunk, first_line, path)
            line, text = first_line + chunk[:n_bytes].count(b"\n"), chunk[n_bytes:]
        if columns is None or not text.strip():
            continue
        rows = _even_rows(text, line, columns) or _uneven_rows(text, line, columns, summary, path)
        yield _block(rows, columns, summary, path)
    if columns is None:
        raise TraceError(f"{path} has no header", "the first line names the columns")


def _header(chunk: bytes, first_line: int, path: Path) -> tuple[dict[str, int] | None, int]:
    """The columns, and the byte where the rows begin; the header may be a comment."""
    columns, n_bytes = None, 0
    for number, line in enumerate(chunk.splitlines(keepends=True)):
        words = line.decode("utf-8", "replace")
        is_comment = words.startswith("#")
        if (is_comment and _is_header(words)) or not (is_comment or columns or not words.strip()):
            columns = _columns(words.strip(), path, first_line + number)
        elif not is_comment and columns:
            break
        n_bytes += len(line)
    return columns, n_bytes


Checks = dict[LeftOut, dict[str, NDArray[np.bool_]]]
"""By reason and column, which rows are right."""
Names = tuple[NDArray[np.intp], list[str]]
"""Of each row the number of its name, and the distinct names."""


@dataclass(frozen=True)
class _Rows:
    """The columns that matter, of the rows of one piece of the file."""

    names: dict[str, Names]
    numbers: dict[str, Floats]
    """NaN = none. Columns that the file lacks are missing."""
    line: Callable[[int], int]
    """The number of a row's line."""
    cells: Callable[[int], list[str]]
    """A row's cells."""
    n_rows: int


def _even_rows(text: bytes, first_line: int, columns: dict[str, int]) -> _Rows | None:
    """Rows that all have their columns; None if any does not, is quoted, or is a comment."""
    if b"#" in text or b'"' in text:
        return None
    fields = Fields(text, b",")
    first, n_fields = fields.lines()
    blank = (n_fields == 1) & fields.are(first, b"")
    first, n_fields = first[~blank], n_fields[~blank]
    if not len(first) or n_fields.min() <= max(columns.values()):
        return None
    texts = {name: fields.texts(first + columns[name], first + columns[name]) for name in _NAMES}
    numbers = {name: _column(fields, first + columns[name]) for name in _NUMBERS if name in columns}
    if any(one is None for one in texts.values()) or any(one is None for one in numbers.values()):
        return None
    names = {name: (one[0], [text.decode("utf-8", "replace") for text in one[1]]) for name, one in texts.items() if one}

    def line(at: int) -> int:
        return int(np.flatnonzero(~blank)[at])

    return _Rows(
        names,
        {name: one for name, one in numbers.items() if one is not None},
        lambda at: first_line + line(at),
        lambda at: text.split(b"\n")[line(at)].decode("utf-8", "replace").split(","),
        len(first),
    )


def _column(fields: Fields, column: Integers) -> Floats | None:
    """A column of numbers; those in unusual forms are read by float(), each distinct one once."""
    numbers = fields.decimals(column)
    texts = fields.texts(column, column) if numbers is None else None
    return np.array(list(map(_number, texts[1])))[texts[0]] if texts is not None else numbers


def _uneven_rows(text: bytes, first_line: int, columns: dict[str, int], summary: Summary, path: Path) -> _Rows:
    """Those rows that have enough fields."""
    found, width = rows_of(text, path), max(columns.values()) + 1
    places = [at for at, row in enumerate(found) if row]
    short = [at for at in places if len(found[at]) < width]
    examples = (f"line {first_line + line_of(found, at)} of {path.name}" for at in short[:MAX_EXAMPLES])
    summary.skip(LeftOut.few_columns, len(short), *examples)
    kept = [at for at in places if len(found[at]) >= width]
    rows = [found[at] for at in kept]
    names: dict[str, Names] = {}
    for name in _NAMES:
        texts = [row[columns[name]] for row in rows]
        known = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        names[name] = (np.array([known[text] for text in texts], np.intp), list(known))
    numbers = {
        name: np.array([_number(row[columns[name]]) for row in rows], np.float64)
        for name in _NUMBERS
        if name in columns
    }
    return _Rows(names, numbers, lambda at: first_line + line_of(found, kept[at]), lambda at: rows[at], len(rows))


def _columns(header: str, path: Path, line: int) -> dict[str, int]:
    columns = {name: index for index, name in enumerate(header_cells(header))}
    missing = [name for name in TUNER_REQUIRED if name not in columns]
    if missing:
        unlike = Refusal(f"lacks the column {missing[0]} (line {line})", "docs/reference/traces.md lists the columns")
        wrong = wrong_with(header, line) or unlike
        raise TraceError(f"{path} {wrong.what}", wrong.remedy)
    return columns


def _numbers_of(names: Names, find: Callable[[str], int]) -> NDArray[np.int64]:
    """The number of each name, looked up once per distinct one; -1 for an empty name, 255 for an unknown one."""
    picks, texts = names
    known = []
    for text in texts:
        try:
            known.append(-1 if text.strip().lower() in _NOTHING else find(text))
        except UserError:
            known.append(UNKNOWN_U1)
    return np.array(known, np.int64)[picks]


def _are(names: Names, wanted: str) -> NDArray[np.bool_]:
    """Which rows say `wanted`."""
    picks, texts = names
    return np.array([text.strip().lower() == wanted for text in texts], np.bool_)[picks]


def _collective(text: str) -> int:
    found = find_collective(text)
    return UNKNOWN_U1 if found is None else int(found)


def _block(rows: _Rows, columns: dict[str, int], summary: Summary, path: Path) -> Block:
    n_rows = rows.n_rows
    block = empty_block(n_rows)
    collective = _numbers_of(rows.names["collective"], _collective)
    algorithm = _numbers_of(rows.names["algorithm"], parse_algorithm)
    protocol = _numbers_of(rows.names["protocol"], parse_protocol)
    unknown = np.full(n_rows, np.nan)
    message_bytes, channels, n_nodes, n_ranks, latency_us = (rows.numbers.get(name, unknown) for name in _NUMBERS)
    is_default = _are(rows.names["algorithm"], _NCCLS_CHOICE) | ((algorithm == -1) & (protocol == -1))
    named = _is_name(algorithm) & _is_name(protocol)
    # Taken for "channels unknown", such a row would pass for a measurement of the algorithm and protocol alone.
    checks: Checks = {
        LeftOut.unknown_name: {
            "collective": _is_name(collective),
            "algorithm": is_default | _is_name(algorithm),
            "protocol": is_default | _is_name(protocol),
            "size_bytes": (message_bytes > 0) & (message_bytes == np.floor(message_bytes)) & np.isfinite(message_bytes),
            "latency_us": ~np.isinf(latency_us),
        },
        LeftOut.impossible_channels: {"channels": is_default | _is_count(channels, _MOST_CHANNELS)},
        LeftOut.impossible_ranks_or_nodes: {
            "ranks": _is_count(n_ranks, _MOST_RANKS),
            "nodes": _is_count(n_nodes, _MOST_RANKS),
        },
        LeftOut.impossible_time: {"latency_us": np.isnan(latency_us) | _is_time(latency_us)},
    }
    usable = _usable(checks, rows, columns, summary, path)
    timed = _is_time(latency_us)
    block["collective"] = np.where(usable, collective, 0)
    block["algorithm"] = np.where(named, algorithm, UNKNOWN_U1)
    block["protocol"] = np.where(named, protocol, UNKNOWN_U1)
    block["message_bytes"] = np.where(usable, np.clip(message_bytes, 0, 1 << 51), 0)
    for name, values, most in (
        ("n_ranks", n_ranks, _MOST_RANKS),
        ("n_nodes", n_nodes, _MOST_RANKS),
        ("n_channels", channels, _MOST_CHANNELS),
    ):
        block[name] = np.where((values >= 0) & _is_count(values, most), values, 0)
    block["rank"] = 0
    block["duration_us"] = np.where(timed, latency_us, -1.0)
    block["timing_source"] = np.where(timed, TimingSource.reported, TimingSource.none)
    block["flags"] = np.where(timed, FLAG_TIMED, 0) + np.where(is_default, FLAG_DEFAULT, FLAG_FORCED)
    kept: Block = block[usable]
    return kept


def _usable(checks: Checks, rows: _Rows, columns: dict[str, int], summary: Summary, path: Path) -> NDArray[np.bool_]:
    """Which rows pass all checks; the others are counted by reason, the first with their values and lines."""
    usable = np.ones(rows.n_rows, np.bool_)
    for reason, by_column in checks.items():
        right = np.logical_and.reduce(list(by_column.values()))
        wrong = np.flatnonzero(usable & ~right)
        examples = []
        for at in wrong[:MAX_EXAMPLES].tolist():
            name = next(name for name, is_right in by_column.items() if not is_right[at])
            value = value_in(name, rows.cells(at)[columns[name]])
            examples.append(f"{value} in line {rows.line(at)} of {path.name}")
        summary.skip(reason, len(wrong), *examples)
        usable &= right
    return usable


def _is_name(numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    known: NDArray[np.bool_] = (numbers >= 0) & (numbers != UNKNOWN_U1)
    return known


def _is_time(us: Floats) -> NDArray[np.bool_]:
    possible: NDArray[np.bool_] = (us > 0) & (us < _MOST_US)
    return possible


def _is_count(values: Floats, most: int) -> NDArray[np.bool_]:
    """Which are whole numbers from 0 to `most`, or empty (-1 stands for that, too)."""
    possible: NDArray[np.bool_] = (values >= -1) & (values <= most) & (values == np.floor(values))
    return possible | np.isnan(values)


def _number(text: str | bytes) -> float:
    """The number in a cell; NaN for an empty cell, infinity for other text."""
    word = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    if word.strip().lower() in _NOTHING:
        return math.nan
    try:
        number = float(word)
    except ValueError:
        return math.inf
    # Python reads more than tables mean: 1_024, and digits of other scripts.
    is_plain = word.isascii() and "_" not in word and not math.isnan(number)
    return number if is_plain else math.inf
