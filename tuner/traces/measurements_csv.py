"""Our own measurements as CSV, as `zerotune export --to measurements` writes them.

Columns are those of store.measurements.MEASUREMENT, with names in place of numbers; empty = unknown. Runs that
failed have no duration worth keeping and are left out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np

from store.errors import TraceError
from store.records import Algorithm, Collective, Outcome, Phase, Protocol, TimingSource
from tuner.traces.files import line_chunks
from tuner.traces.records import FLAG_DEFAULT, FLAG_TIMED, UNKNOWN_U1, Block, Summary, empty_block

_REQUIRED: Final = ("n_ranks", "n_nodes", "message_bytes", "duration_us", "collective")
_NAMED: Final[dict[str, type[IntEnum]]] = {
    "collective": Collective,
    "phase": Phase,
    "algorithm": Algorithm,
    "protocol": Protocol,
    "timing_source": TimingSource,
}
_NUMBERS: Final = ("n_ranks", "n_nodes", "message_bytes", "duration_us", "n_channels", "memory_pressure")
_LIMITS: Final = {"n_ranks": 1 << 32, "n_nodes": 1 << 32, "message_bytes": 1 << 51, "n_channels": 65}


def matches(begin: bytes) -> bool:
    """The header names our columns."""
    first = begin.split(b"\n", 1)[0].strip().split(b",")
    return all(name.encode() in first for name in _REQUIRED)


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """One record per row."""
    header: list[str] | None = None
    for chunk in line_chunks(path, summary):
        try:
            rows = list(csv.reader(io.StringIO(chunk.decode("utf-8", "replace"))))
        except csv.Error as error:
            raise TraceError(f"{path} is no CSV: {error}", "export it again") from None
        if header is None and rows:
            header = rows.pop(0)
        if header is None:
            continue
        whole = [row for row in rows if len(row) == len(header)]
        summary.skip("row with another number of columns", sum(1 for row in rows if row) - len(whole))
        if whole:
            yield _block(dict(zip(header, zip(*whole, strict=True), strict=True)), len(whole), summary)


def _block(columns: dict[str, Sequence[str]], n_rows: int, summary: Summary) -> Block:
    block = empty_block(n_rows)
    usable = np.ones(n_rows, bool)
    for name, kind in _NAMED.items():
        numbers = _each(columns.get(name, ("",) * n_rows), _numbers_of(kind, -1 if name in _OPTIONAL else -2))
        usable &= numbers != -2
        unknown = UNKNOWN_U1 if name in ("algorithm", "protocol") else 0
        block[name] = np.where(numbers < 0, unknown, numbers)
    for name in _NUMBERS:
        values = _each(columns.get(name, ("",) * n_rows), _number)
        limit = _LIMITS.get(name)
        if limit is not None:
            usable &= ~((values < 0) | (values >= limit))
            values = np.where(np.isfinite(values) & (values >= 0) & (values < limit), values, 0)
        block[name] = values
    ok = np.array([outcome in ("", Outcome.ok.name) for outcome in columns.get("outcome", ("",) * n_rows)])
    timed = (block["duration_us"] > 0) & (block["duration_us"] < 1e12)
    block["duration_us"] = np.where(timed, block["duration_us"], -1.0)
    is_default = _each(columns.get("is_default", ("",) * n_rows), _number) == 1
    block["flags"] = np.where(timed, FLAG_TIMED, 0) + np.where(is_default, FLAG_DEFAULT, 0)
    summary.skip("run that failed", int((~ok).sum()))
    summary.skip("row with an unknown name or number", int((ok & ~usable).sum()))
    kept: Block = block[ok & usable]
    return kept


_OPTIONAL: Final = frozenset({"phase", "algorithm", "protocol", "timing_source"})


def _each(texts: Sequence[str], find: Callable[[str], float]) -> Any:
    """`find` of every text, each distinct one looked up once."""
    known = {text: find(text) for text in set(texts)}
    return np.array([known[text] for text in texts], np.float64)


def _numbers_of(kind: type[IntEnum], if_empty: int) -> Callable[[str], float]:
    members = {name: int(member) for name, member in kind.__members__.items()}
    return lambda text: members.get(text, -2) if text else if_empty


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
