"""Tables that can nearly be read: what is wrong with them, in which line, and what to do about it."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import Final

from zerotune.agent.nccl.catalog import find_collective
from zerotune.tuner.traces.csv_rows import cells_of, header_cells
from zerotune.tuner.traces.refused import Refusal

TUNER_COLUMNS: Final = (
    "collective", "size_bytes", "algorithm", "protocol", "channels", "nodes", "ranks", "pipeOps", "regBuff",
    "cost_metric", "bandwidth_gbps", "latency_us",
)  # fmt: skip
"""Columns of NVIDIA's tuner CSV; the first four are required."""
TUNER_REQUIRED: Final = TUNER_COLUMNS[:4]
OWN_REQUIRED: Final = ("n_ranks", "n_nodes", "message_bytes", "duration_us", "collective")
"""Columns of our own measurements."""
_OWN: Final = {*OWN_REQUIRED, "algorithm", "protocol", "n_channels", "is_default", "phase", "job_id", "fabric_id"}
_TUNER: Final = {name.lower() for name in TUNER_COLUMNS}
_SEPARATORS: Final = {";": "semicolons", "\t": "tabs", "|": "bars"}
_UTF_16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_LIKE_A_HEADER: Final = 3
_OTHER_UNIT: Final = re.compile(
    r"\b(size|bytes|time|latency|duration)[a-z]*[ _]*\(?(ms|msec|s|sec|ns|kb|kib|mb|mib|gb|gib)\)?\s*(?:,|$)"
)
_ROW: Final = re.compile(
    rb"(?m)^ *\d+ +\d+ +(?:b?float\w*|half|double|u?int\w*|fp8\w*|f8\w*) +(?:[a-z]+ +)?-?\d[-\d. ]*$"
)
_LEAST_LETTERS: Final = 4
"""Of a name that is short for another."""
_SHOWN: Final = 80


def near_miss(begin: bytes) -> Refusal | None:
    """Why a file with this beginning is not one of the two tables; None if it resembles neither."""
    if begin.startswith(_UTF_16):
        return Refusal("is text in UTF-16", "save it as UTF-8: `iconv -f UTF-16 -t UTF-8 FILE > NEW`")
    for number, line in _first_lines(begin):
        found = wrong_with(line, number)
        if found is not None:
            return found
    if _ROW.search(begin):
        what = "has rows of nccl-tests' table without the heading that names their columns"
        return Refusal(what, "copy it with the lines before the table (its last ones name size, time, algbw, busbw)")
    return None


def wrong_with(line: str, number: int) -> Refusal | None:
    """What is wrong with the line that should name a table's columns, or that stands where it should."""
    header = line.lstrip("# ")
    for separator, words in _SEPARATORS.items():
        names = {name.strip(' "').lower() for name in header.split(separator)}
        if len(names & _TUNER) >= _LIKE_A_HEADER or len(names & _OWN) >= _LIKE_A_HEADER:
            what = f"separates its columns with {words} (line {number}: {_cut(line)!r})"
            return Refusal(what, "save it with commas, and with points in its numbers")
    unit = _OTHER_UNIT.search(header.lower()) if "," in header else None
    if unit is not None:
        return Refusal(
            f"gives its {unit[1]} in {unit[2]} (line {number}: {_cut(line)!r})",
            "give sizes in bytes and times in microseconds, as size_bytes and time_us",
        )
    cells = header_cells(line)
    missing = _missing_column(cells)
    short = [cell for cell in cells if missing is not None and len(cell) >= _LEAST_LETTERS and missing.startswith(cell)]
    if short:
        return Refusal(
            f"has the column {short[0]}, but not {missing} (line {number}: {_cut(line)!r})",
            f"rename it if it holds the same; docs/reference/traces.md says what {missing} holds",
        )
    if missing is not None:
        return Refusal(
            f"lacks the column {missing} (line {number}: {_cut(line)!r})",
            "add it; docs/reference/traces.md says what it holds",
        )
    cells = cells_of(line)
    if len(cells) >= len(TUNER_REQUIRED) and cells[1].strip().isdigit() and find_collective(cells[0]) is not None:
        return Refusal(
            f"has no line that names its columns (line {number} is a row: {_cut(line)!r})",
            f"begin it with those that it has, in their order, of {','.join(TUNER_COLUMNS)}",
        )
    return None


def _missing_column(cells: Iterable[str]) -> str | None:
    """The first column that this header lacks to be one of the tables; None if it lacks none, or is no such header."""
    names = set(cells)
    n_own, n_tuner = len(names & _OWN), len(names & _TUNER)
    if max(n_own, n_tuner) < _LIKE_A_HEADER:
        return None
    required = OWN_REQUIRED if n_own > n_tuner else TUNER_REQUIRED
    return next((name for name in required if name not in names), None)


def _first_lines(begin: bytes) -> Iterator[tuple[int, str]]:
    """(line number, text) of the comments at the beginning, and of the first other line."""
    for number, line in enumerate(begin.decode("utf-8", "replace").splitlines(), start=1):
        if line.strip():
            yield number, line
            if not line.lstrip().startswith("#"):
                return


def _cut(line: str) -> str:
    line = line.strip()
    return line if len(line) <= _SHOWN else line[: _SHOWN - 3] + "..."
