"""NVIDIA's tuner CSV, as measured input: one setting with its cost per row.

Columns: collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff,cost_metric,
bandwidth_gbps,latency_us; `size_bytes` is the total. Algorithm `default` (or -1 channels with no
algorithm) is NCCL's own choice. `latency_us`, where given, is the measured time; `cost_metric` is whatever its
author minimised and is not taken for a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent.nccl.catalog import find_collective, parse_algorithm, parse_protocol
from store.errors import TraceError, UserError
from store.records import TimingSource
from tuner.traces.files import line_chunks
from tuner.traces.records import FLAG_DEFAULT, FLAG_TIMED, UNKNOWN_U1, Block, Summary, empty_block

_REQUIRED: Final = ("collective", "size_bytes", "algorithm", "protocol")
_NOTHING: Final = ("", "default", "none", "-1")


def matches(begin: bytes) -> bool:
    """The header line, which may be a comment, names the first columns."""
    for line in begin.splitlines():
        if _is_header(line.decode("utf-8", "replace")):
            return True
        if line.strip() and not line.lstrip().startswith(b"#"):
            return False
    return False


def _is_header(line: str) -> bool:
    names = line.lstrip("# ").replace(" ", "").lower()
    return names.startswith("collective,") and "size_bytes" in names and "algorithm" in names


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """One record per row; rows without `latency_us` have no duration."""
    columns: dict[str, int] | None = None
    known = _Names()
    for chunk in line_chunks(path, summary):
        text = chunk.decode("utf-8", "replace")
        table = None if columns is None else _even_table(text, len(columns))
        if columns is None or table is None:
            lines = text.splitlines()
            if columns is None:
                commented = next((line for line in lines if line.startswith("#") and _is_header(line)), None)
                if commented is not None:
                    columns = _columns(commented.lstrip("# "), path)
            lines = [line for line in lines if line.strip() and line[0] != "#"]
            if not lines:
                continue
            if columns is None:
                columns = _columns(lines.pop(0), path)
            table = _even_table("\n".join(lines), len(columns)) or _uneven_table(lines, columns, summary)
        if table:
            yield _block(table, columns, known, summary)
    if columns is None:
        raise TraceError(f"{path} has no header", "the first line names the columns")


def _even_table(text: str, n_columns: int) -> list[list[str]] | None:
    """Columns of rows that all have `n_columns` fields, cut in one go; None if any row differs."""
    cells = text.rstrip("\n").replace("\n", ",\n,").split(",")
    n_cells = n_columns + 1
    if (len(cells) + 1) % n_cells or not set(cells[n_columns::n_cells]) <= {"\n"} or "#" in text:
        return None
    return [cells[column::n_cells] for column in range(n_columns)]


def _uneven_table(lines: list[str], columns: dict[str, int], summary: Summary) -> list[list[str]]:
    """Columns of those rows that have enough fields."""
    width = max(columns.values()) + 1
    rows = [row[:width] for row in (line.split(",") for line in lines) if len(row) >= width]
    summary.skip("row with too few columns", len(lines) - len(rows))
    return [list(column) for column in zip(*rows, strict=True)]


def _columns(header: str, path: Path) -> dict[str, int]:
    names = [name.strip().lower() for name in header.split(",")]
    columns = {name: index for index, name in enumerate(names)}
    missing = [name for name in _REQUIRED if name not in columns]
    if missing:
        raise TraceError(f"{path} lacks the column {missing[0]}", "see docs/traces.md for NVIDIA's columns")
    return columns


class _Names:
    """Numbers of names: each distinct text is looked up once."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, int]] = {}

    def numbers(self, kind: str, texts: Sequence[str], find: Callable[[str], int]) -> list[int]:
        """The number of each text; -1 for nothing said, 255 for a name that is none."""
        known = self._known.setdefault(kind, {})
        for text in set(texts).difference(known):
            try:
                known[text] = -1 if text.strip().lower() in _NOTHING else find(text)
            except UserError:
                known[text] = UNKNOWN_U1
        return list(map(known.__getitem__, texts))


def _collective(text: str) -> int:
    found = find_collective(text)
    return UNKNOWN_U1 if found is None else int(found)


def _block(table: Sequence[Sequence[str]], columns: dict[str, int], known: _Names, summary: Summary) -> Block:
    n_rows = len(table[0])
    block = empty_block(n_rows)
    collective = np.array(known.numbers("collective", table[columns["collective"]], _collective))
    algorithm = np.array(known.numbers("algorithm", table[columns["algorithm"]], parse_algorithm))
    protocol = np.array(known.numbers("protocol", table[columns["protocol"]], parse_protocol))

    def numbers(name: str) -> Any:
        if name not in columns:
            return np.full(n_rows, np.nan)
        return _numbers(table[columns[name]])

    message_bytes, n_ranks, n_nodes = numbers("size_bytes"), numbers("ranks"), numbers("nodes")
    channels, latency_us = numbers("channels"), numbers("latency_us")
    is_default = (algorithm == -1) & (protocol == -1)
    named = (algorithm >= 0) & (algorithm != UNKNOWN_U1) & (protocol >= 0) & (protocol != UNKNOWN_U1)
    usable = (collective >= 0) & (collective != UNKNOWN_U1) & (is_default | named) & (message_bytes > 0)
    summary.skip("row with an unknown name or number", int((~usable).sum()))
    timed = (latency_us > 0) & (latency_us < 1e12)
    block["collective"] = np.where(usable, collective, 0)
    block["algorithm"] = np.where(named, algorithm, UNKNOWN_U1)
    block["protocol"] = np.where(named, protocol, UNKNOWN_U1)
    block["message_bytes"] = np.where(usable, np.clip(message_bytes, 0, 1 << 51), 0)
    for name, values, most in (
        ("n_ranks", n_ranks, 1 << 24),
        ("n_nodes", n_nodes, 1 << 24),
        ("n_channels", channels, 64),
    ):
        block[name] = np.where((values >= 0) & (values <= most), values, 0)
    block["rank"] = 0
    block["duration_us"] = np.where(timed, latency_us, -1.0)
    block["timing_source"] = np.where(timed, TimingSource.reported, TimingSource.none)
    block["flags"] = np.where(timed, FLAG_TIMED, 0) + np.where(is_default, FLAG_DEFAULT, 0)
    kept: Block = block[usable]
    return kept


def _numbers(texts: Sequence[str]) -> Any:
    try:
        return np.array(list(map(float, texts)))
    except ValueError:
        return np.array([_number(text) for text in texts])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
