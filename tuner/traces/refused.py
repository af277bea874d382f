"""Reasons for refusing files: known kinds without anything to import, and tables that can nearly be read.

The message says what to do instead, unlike "no known format".
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from ...agent.nccl.catalog import find_collective
from .csv_rows import cells_of, header_cells


class Refusal(NamedTuple):
    """Why a file cannot be imported, and what its owner can do."""

    what: str
    remedy: str


_JUDGE: Final = "judge it with `zerotune replay TRACE --policy table --plan FILE`"
_RULES: Final = Refusal("is a table of tuner rules: choices, not measurements", _JUDGE)
_ARCHIVE: Final = Refusal("is an archive", "unpack it and name a file of it, or the folder")
_PACKED: Final = Refusal("is packed in a way that is not read", "unpack it, or pack it with gzip")
_BEGINNINGS: Final = {
    b"PK\x03\x04": _ARCHIVE,
    b"\x28\xb5\x2f\xfd": _PACKED,
    b"\xfd7zXZ\0": _PACKED,
    b"BZh": _PACKED,
    b"7z\xbc\xaf\x27\x1c": _PACKED,
    b"PAR1": Refusal("is Parquet", "import the CSV that `zerotune store export --to measurements` writes"),
    b"SQLite format 3\0": Refusal(
        "is a SQLite database, perhaps our store or one of Nsight's, and no trace",
        "give a trace, or what `zerotune store export FILE --to measurements` writes of a store",
    ),
}
_OBJECTS: Final = {
    (b'"workload_graph"',): Refusal(
        "is a Chakra graph as JSON, which does not say how many bytes its collectives move",
        "import the protobuf trace that it was made from",
    ),
    (b'"zerotune_plan"',): Refusal("is a plan: choices, not measurements", _JUDGE),
    (b'"n_cells"', b'"n_places"', b'"n_visited"'): Refusal(
        "is what `zerotune sweep --json` prints: medians, whose samples are in the sweep's store already",
        "take them elsewhere with `zerotune store export samples.csv --to measurements`",
    ),
}
"""Texts at the beginning of a JSON object of each kind."""
_BEGIN_OF_OBJECT_BYTES: Final = 2048
_MEASURE: Final = "measure with nccl-tests, whose output is imported"
_LOG: Final = "log with `zerotune launch --log-trace`, PyTorch's Flight Recorder or its profiler"
_FIRST_LINES: Final = {
    b"time(%),totaltime(ns),": Refusal(
        "is Nsight's summary of kernels or ranges: it does not say how many bytes were sent, nor among how many ranks",
        _LOG,
    ),
    b",rank,comp_comm_overlap_pctg": Refusal(
        "is HTA's table of overlap: shares of time, no collectives",
        "import the profiler's traces that it was made from",
    ),
    b"#osumpi": Refusal("is an OSU benchmark of MPI, whose times are not NCCL's", _MEASURE),
    b"#bytes#iterations": Refusal("is perftest's table of one link: no collectives", _MEASURE),
    b"gpu_cc,op,dtype,shape_elems,": Refusal(
        "is XLA's collective performance table: throughputs by XLA's own definition, no times and no settings", _MEASURE
    ),
    b"coll,nnodes,nranks,upto_bytes,": _RULES,
    b"colltype,bytesperrank,": _RULES,
}
"""Beginnings of tables' first lines, without spaces and in lower case."""
_NVIDIA_RULE: Final = re.compile(
    rb"(?m)^#?\s*collective_type\s*,\s*min_bytes|^[a-z]+,\d+,\d+,[a-z_]+,[a-z0-9]+,-?\d+,-?\d+,-?\d+"
)
_DEEPSPEED: Final = (b"| comm op: ", b"Comm. Op ")


def refusal(begin: bytes) -> Refusal | None:
    """The reason not to import a file with this beginning; None if it is of no such kind."""
    if begin[257:262] == b"ustar":
        return _ARCHIVE
    known = [why for mark, why in _BEGINNINGS.items() if begin.startswith(mark)]
    if begin.lstrip().startswith(b"{"):
        begun = begin[:_BEGIN_OF_OBJECT_BYTES]
        known += [why for marks, why in _OBJECTS.items() if all(mark in begun for mark in marks)]
    first_line = begin.lstrip().split(b"\n", 1)[0].replace(b" ", b"").lower()
    known += [why for mark, why in _FIRST_LINES.items() if first_line.startswith(mark)]
    if known:
        return known[0]
    if _NVIDIA_RULE.search(begin[:4096]):
        return _RULES
    if b"collectivename," in first_line and b"inmsgnelems" in first_line and b"comm_latency" not in first_line:
        return Refusal(
            "is TraceLens's table of single ranks: the latency of whole collectives is missing, and a rank's duration"
            " includes waiting for the others",
            "import nccl_summary_implicit_sync.csv of the same report (its columns comm_latency_...), or the traces",
        )
    if any(mark in begin for mark in _DEEPSPEED):
        return Refusal(
            "is a log of DeepSpeed's comms logger: sizes are rounded, the number of ranks is not told, and every call"
            " was synchronised for timing",
            _LOG,
        )
    return None


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
"""Least letters of an abbreviated name."""
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
    """The fault of the line that names a table's columns, or of the line in its place."""
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
            f"rename it if it holds the same; docs/reference/formats.md says what {missing} holds",
        )
    if missing is not None:
        return Refusal(
            f"lacks the column {missing} (line {number}: {_cut(line)!r})",
            "add it; docs/reference/formats.md says what it holds",
        )
    cells = cells_of(line)
    if len(cells) >= len(TUNER_REQUIRED) and cells[1].strip().isdigit() and find_collective(cells[0]) is not None:
        return Refusal(
            f"has no line that names its columns (line {number} is a row: {_cut(line)!r})",
            f"begin it with those that it has, in their order, of {','.join(TUNER_COLUMNS)}",
        )
    return None


def _missing_column(cells: Iterable[str]) -> str | None:
    """The first column that a header of these tables lacks; None if it lacks none, or is no such header."""
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
