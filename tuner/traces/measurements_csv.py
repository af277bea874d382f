"""Our own measurements as CSV, as `zerotune export --to measurements` writes them.

Columns are those of store.measurements.MEASUREMENT, with names in place of numbers, and the job and fabric that a
row was measured on; empty = unknown.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from store.errors import TraceError
from store.measurements import MEASUREMENT, well_formed
from store.records import Algorithm, Collective, Outcome, Phase, Protocol, Source, TimingSource
from tuner.traces.files import line_chunks
from tuner.traces.measuring import Portion, Said, placed, with_setting, without_impossible
from tuner.traces.records import (
    FLAG_DEFAULT,
    FLAG_FORCED,
    FLAG_TIMED,
    MAX_BYTES,
    UNKNOWN_U1,
    Block,
    Summary,
    empty_block,
)

_REQUIRED: Final = ("n_ranks", "n_nodes", "message_bytes", "duration_us", "collective")
_NAMED: Final[dict[str, tuple[type[IntEnum], int | None]]] = {
    "collective": (Collective, None),
    "phase": (Phase, Phase.other),
    "algorithm": (Algorithm, UNKNOWN_U1),
    "protocol": (Protocol, UNKNOWN_U1),
    "source": (Source, Source.imported),
    "outcome": (Outcome, Outcome.ok),
    "timing_source": (TimingSource, TimingSource.none),
}
"""Columns of names, and what an empty cell means; None: there is none."""
_NUMBERS: Final[dict[str, float]] = {
    "n_ranks": 1 << 32, "n_nodes": 1 << 32, "message_bytes": MAX_BYTES + 1, "duration_us": 1e12, "epoch": 1 << 32,
    "step": 1 << 32, "n_channels": 65, "is_default": 2,
}  # fmt: skip
"""Columns of numbers from 0 on, and the first that is too large; empty = 0. All but the duration are whole."""
_SAME_FIELDS: Final = (
    "n_ranks", "n_nodes", "message_bytes", "duration_us", "epoch", "step", "memory_pressure", "collective", "phase",
    "algorithm", "protocol", "n_channels", "timing_source",
)  # fmt: skip
_MAX_NAME: Final = 200
_NOBODY: Final = ("algorithm", "is_default")
"""With neither column nobody says what ran, unless the user does."""

Columns = Mapping[str, Sequence[str]]


def matches(begin: bytes) -> bool:
    """The header names our columns."""
    first = begin.split(b"\n", 1)[0].strip().split(b",")
    return all(name.encode() in first for name in _REQUIRED)


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """One record per row that succeeded: the others are no calls that a job would repeat."""
    for columns, n_rows in _columns(path, summary):
        rows, _ = _rows(columns, n_rows, summary)
        ok = rows["outcome"] == Outcome.ok
        summary.skip("run that failed or stands out", int((~ok).sum()))
        rows = without_impossible(rows[ok], summary)
        block = empty_block(len(rows))
        for name in _SAME_FIELDS:
            block[name] = rows[name]
        timed = rows["duration_us"] > 0
        block["duration_us"] = np.where(timed, rows["duration_us"], -1.0)
        asked = np.where(rows["algorithm"] == UNKNOWN_U1, 0, FLAG_FORCED)
        block["flags"] = np.where(timed, FLAG_TIMED, 0) + np.where(rows["is_default"], FLAG_DEFAULT, asked)
        yield block


def portions(path: Path, said: Said, summary: Summary, found: Callable[[bytes], None]) -> Iterator[Portion]:
    """The rows as they were exported, by job and fabric; `found` is told what the file has, whatever was said."""
    for columns, n_rows in _columns(path, summary):
        rows, kept = _rows(columns, n_rows, summary)
        summary.n_records += len(rows)
        summary.n_timed += int((rows["duration_us"] > 0).sum())
        summary.n_settings += int((rows["algorithm"] != UNKNOWN_U1).sum())
        if summary.collective is not None and (rows["collective"] != summary.collective).any():
            summary.note(f"the file says which collective ran: --collective {summary.collective.name} was not used")
        jobs, fabrics = ([text[:_MAX_NAME] for text in columns.get(name, ("",) * n_rows)] for name in _OF_JOB)
        owners = [owner for owner, is_kept in zip(zip(jobs, fabrics, strict=True), kept, strict=True) if is_kept]
        numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
        numbered = np.array([numbers[owner] for owner in owners], np.int64)
        found(rows.tobytes() + numbered.tobytes() + repr(list(numbers)).encode())
        is_silent = not any(name in columns for name in _NOBODY)
        for (job_id, fabric_id), number in numbers.items():
            chosen = _said(rows[numbered == number], said, summary, is_silent=is_silent)
            if len(chosen):
                yield Portion(chosen, job_id or None, fabric_id or None, path=path)


_OF_JOB: Final = ("job_id", "fabric_id")


def _said(rows: Block, said: Said, summary: Summary, *, is_silent: bool) -> Block:
    rows = placed(rows, said, summary)
    if not is_silent:
        for option, value in (("--setting", said.setting), ("--default", said.is_default)):
            if value:
                summary.note(f"the file says what ran and what was NCCL's own choice: {option} was not used")
        return rows
    return with_setting(rows, said, summary)


def _columns(path: Path, summary: Summary) -> Iterator[tuple[Columns, int]]:
    """Piece by piece, the texts of each column and the number of rows."""
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
            yield dict(zip(header, zip(*whole, strict=True), strict=True)), len(whole)


def _rows(columns: Columns, n_rows: int, summary: Summary) -> tuple[Block, NDArray[np.bool_]]:
    """The rows that the store would take, and which of the file's rows these are."""
    rows = np.zeros(n_rows, MEASUREMENT)
    usable = np.ones(n_rows, bool)
    nothing = ("",) * n_rows
    for name, (kind, if_empty) in _NAMED.items():
        numbers = _each(columns.get(name, nothing), _numbers_of(kind, if_empty))
        usable &= numbers >= 0
        rows[name] = np.where(numbers >= 0, numbers, 0)
    for name, limit in _NUMBERS.items():
        values = _each(columns.get(name, nothing), _number)
        possible = (values >= 0) & (values < limit) & ((values == np.floor(values)) | (name == "duration_us"))
        usable &= possible
        rows[name] = np.where(possible, values, 0)
    pressure = _each(columns.get("memory_pressure", nothing), lambda text: _number(text) if text else np.nan)
    rows["memory_pressure"] = np.where(np.abs(pressure) < 1e6, pressure, np.nan)
    usable &= well_formed(rows)
    summary.skip("row with an unknown name or number", int((~usable).sum()))
    return rows[usable], usable


def _each(texts: Sequence[str], find: Callable[[str], float]) -> Any:
    """`find` of every text, each distinct one looked up once."""
    known = {text: find(text) for text in set(texts)}
    return np.array([known[text] for text in texts], np.float64)


def _numbers_of(kind: type[IntEnum], if_empty: int | None) -> Callable[[str], float]:
    members = {name: int(member) for name, member in kind.__members__.items()}
    return lambda text: members.get(text, -1) if text else -1 if if_empty is None else if_empty


def _number(text: str) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return float("nan")
