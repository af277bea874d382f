"""Our own measurements as CSV, as `zerotune store export --to measurements` writes them.

Columns are those of store.sqlite.rows.measurements.MEASUREMENT, with names instead of numbers, and the row's job and
fabric; empty = unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ....store.records import Algorithm, Collective, Outcome, Phase, Protocol, Source, TimingSource
from ....store.sqlite.rows.measurements import MEASUREMENT, well_formed
from ....store.wire import FLAG_TIMED
from ..csv_rows import cells_of, csv_chunks, numbered, rows_of, value_in
from ..left_out import LeftOut
from ..measuring import Portion, UserFacts, placed, with_setting, without_impossible
from ..records import FLAG_DEFAULT, FLAG_FORCED, MAX_BYTES, MAX_EXAMPLES, UNKNOWN_U1, Block, Summary, empty_block
from ..refused import OWN_REQUIRED

_NAMED: Final[dict[str, tuple[type[IntEnum], int | None]]] = {
    "collective": (Collective, None),
    "phase": (Phase, Phase.other),
    "algorithm": (Algorithm, UNKNOWN_U1),
    "protocol": (Protocol, UNKNOWN_U1),
    "source": (Source, Source.imported),
    "outcome": (Outcome, Outcome.ok),
    "timing_source": (TimingSource, TimingSource.none),
}
"""Columns of names, and the meaning of an empty cell; None: an empty cell is not allowed."""
_NUMBERS: Final[dict[str, float]] = {
    "n_ranks": 1 << 32, "n_nodes": 1 << 32, "message_bytes": MAX_BYTES + 1, "duration_us": 1e12, "epoch": 1 << 32,
    "step": 1 << 32, "n_channels": 65, "is_default": 2, "chunk_bytes": 1 << 32,
}  # fmt: skip
"""Columns of numbers from 0 on, and the smallest too large number; empty = 0. All but the duration are whole."""
_SAME_FIELDS: Final = (
    "n_ranks", "n_nodes", "message_bytes", "duration_us", "epoch", "step", "memory_pressure", "collective", "phase",
    "algorithm", "protocol", "n_channels", "timing_source", "chunk_bytes",
)  # fmt: skip
_MAX_NAME: Final = 200
_NOBODY: Final = ("algorithm", "is_default")
"""If both columns are missing, only the user can name the setting."""

Columns = Mapping[str, Sequence[str]]


def matches(begin: bytes) -> bool:
    """Whether the header has our columns."""
    first = cells_of(begin.split(b"\n", 1)[0].decode("utf-8", "replace").strip())
    return all(name in first for name in OWN_REQUIRED)


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """One record per row that succeeded; settings that failed are no calls of a job."""
    for piece in _pieces(path, summary):
        rows, _ = _rows(piece, summary)
        ok = rows["outcome"] == Outcome.ok
        summary.skip(LeftOut.failed_run, int((~ok).sum()))
        rows = without_impossible(rows[ok], summary)
        block = empty_block(len(rows))
        for name in _SAME_FIELDS:
            block[name] = rows[name]
        timed = rows["duration_us"] > 0
        block["duration_us"] = np.where(timed, rows["duration_us"], -1.0)
        asked = np.where(rows["algorithm"] == UNKNOWN_U1, 0, FLAG_FORCED)
        block["flags"] = np.where(timed, FLAG_TIMED, 0) + np.where(rows["is_default"], FLAG_DEFAULT, asked)
        yield block


def portions(path: Path, user_facts: UserFacts, summary: Summary, found: Callable[[bytes], None]) -> Iterator[Portion]:
    """The rows as they were exported, by job and fabric.

    `found` is called with bytes that identify the file's content, without the user's options.
    """
    for piece in _pieces(path, summary):
        rows, kept = _rows(piece, summary)
        is_timed = (rows["duration_us"] > 0) | (rows["outcome"] != Outcome.ok)
        summary.skip(LeftOut.no_duration, int((~is_timed).sum()))
        kept[kept] = is_timed
        rows = rows[is_timed]
        summary.n_records += len(rows)
        summary.n_timed += int((rows["duration_us"] > 0).sum())
        summary.n_settings += int((rows["algorithm"] != UNKNOWN_U1).sum())
        if summary.collective is not None and (rows["collective"] != summary.collective).any():
            summary.note(f"the file says which collective ran: --collective {summary.collective.name} was not used")
        jobs, fabrics = (
            [text[:_MAX_NAME] for text in piece.columns.get(name, ("",) * piece.n_rows)] for name in _OF_JOB
        )
        owners = [owner for owner, is_kept in zip(zip(jobs, fabrics, strict=True), kept, strict=True) if is_kept]
        numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
        numbered = np.array([numbers[owner] for owner in owners], np.int64)
        found(rows.tobytes() + numbered.tobytes() + repr(list(numbers)).encode())
        is_silent = not any(name in piece.columns for name in _NOBODY)
        for (job_id, fabric_id), number in numbers.items():
            chosen = _with_user_facts(rows[numbered == number], user_facts, summary, is_silent=is_silent)
            if len(chosen):
                yield Portion(chosen, job_id or None, fabric_id or None, path=path)


_OF_JOB: Final = ("job_id", "fabric_id")


def _with_user_facts(rows: Block, user_facts: UserFacts, summary: Summary, *, is_silent: bool) -> Block:
    rows = placed(rows, user_facts, summary)
    if not is_silent:
        for option, value in (("--setting", user_facts.setting), ("--default", user_facts.is_default)):
            if value:
                summary.note(f"the file says what ran and what was NCCL's own choice: {option} was not used")
        return rows
    return with_setting(rows, user_facts, summary)


@dataclass(frozen=True)
class _Piece:
    """Rows of a piece of the file that have all columns."""

    path: Path
    columns: Columns
    lines: list[int]
    """The number of each row's line."""
    n_rows: int


def _pieces(path: Path, summary: Summary) -> Iterator[_Piece]:
    header: Sequence[str] | None = None
    for first_line, chunk in csv_chunks(path, summary):
        rows = list(numbered(rows_of(chunk, path), first_line))
        if not chunk.endswith(b"\n"):
            rows[-1:] = []  # `export` ends each line, so the last cell may be incomplete
        rows = [(line, row) for line, row in rows if row]
        if header is None and rows:
            header = rows.pop(0)[1]
        if header is None:
            continue
        kept = [(line, row) for line, row in rows if len(row) == len(header)]
        others = [line for line, row in rows if len(row) != len(header)]
        examples = (f"line {line} of {path.name}" for line in others[:MAX_EXAMPLES])
        summary.skip(LeftOut.other_columns, len(others), *examples)
        if kept:
            columns = dict(zip(header, zip(*(row for _, row in kept), strict=True), strict=True))
            yield _Piece(path, columns, [line for line, _ in kept], len(kept))


def _rows(piece: _Piece, summary: Summary) -> tuple[Block, NDArray[np.bool_]]:
    """The rows that the store would accept, and their indices in the file."""
    columns, n_rows = piece.columns, piece.n_rows
    rows = np.zeros(n_rows, MEASUREMENT)
    right: dict[str, NDArray[np.bool_]] = {}
    nothing = ("",) * n_rows
    for name, (kind, if_empty) in _NAMED.items():
        numbers = _each(columns.get(name, nothing), _numbers_of(kind, if_empty))
        right[name] = numbers >= 0
        rows[name] = np.where(right[name], numbers, 0)
    for name, limit in _NUMBERS.items():
        values = _each(columns.get(name, nothing), _number)
        right[name] = (values >= 0) & (values < limit) & ((values == np.floor(values)) | (name == "duration_us"))
        rows[name] = np.where(right[name], values, 0)
    pressure = _each(columns.get("memory_pressure", nothing), lambda text: _number(text) if text else np.nan)
    rows["memory_pressure"] = np.where(np.abs(pressure) < 1e6, pressure, np.nan)
    usable = np.logical_and.reduce(list(right.values())) & well_formed(rows)
    wrong = np.flatnonzero(~usable)
    examples = []
    for at in wrong[:MAX_EXAMPLES].tolist():
        name = next((name for name, is_right in right.items() if not is_right[at]), "")
        what = f"{value_in(name, columns.get(name, nothing)[at])} in line" if name else "line"
        examples.append(f"{what} {piece.lines[at]} of {piece.path.name}")
    summary.skip(LeftOut.unknown_name, len(wrong), *examples)
    return rows[usable], usable


def _each(texts: Sequence[str], find: Callable[[str], float]) -> Any:
    """The result of `find` for every text; equal texts are looked up once."""
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
