"""Converts other tuners' tables from and to rows of a plan: NVIDIA's CSV, RCCL's CSV, NCCLX's CSV and JSON.

NCCL's own example plugin (plugins/tuner/example, NCCL_TUNER_CONFIG_FILE) reads NVIDIA's CSV: the first match wins, -1
means any. Its traps, which the file's head repeats: the plugin presets one channel before it looks for a match. So
collectives without a matching row run on a single channel, and so do rows with channels -1. With 0 NCCL keeps its own
count, so we write 0. Unknown names silently become all_reduce, ring or simple. The plugin's init changes constants of
NCCL's model for Blackwell. It has no phases.

RCCL has NVIDIA's columns, but keeps NCCL's own count if channels are -1 or no row matches. Source:
projects/rccl/src/plugin/tuner/csv_tuner.cc of ROCm/rocm-systems at 96a02418.

NCCLX has columns for an interval of bytes per rank (NCCL's nBytes divided by the ranks), and for ranks per node. It
does not start if it cannot read a row. Source: comms/ncclx/meta/tuner/README.md of meta-pytorch/torchcomms at
46726f15.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ...agent.nccl import catalog
from ...store.atomic_file import users_file
from ...store.counted import counted
from ...store.errors import PlanError, UserError, reason
from ...store.foreign.regular_file import read_file
from ...store.plan_file import MAX_FILE_BYTES
from ...store.records import Candidate, Collective, CommunicatorClass, Phase, PlanRow

NVIDIA_COLUMNS: Final = (
    "collective_type", "min_bytes", "max_bytes", "algorithm", "protocol", "channels", "nNodes", "nRanks",
    "numPipeOps", "regBuff",
)  # fmt: skip
NCCLX_COLUMNS: Final = (
    "collective", "bytesPerRank", "algorithm", "protocol", "channels", "nNodes", "nLocalRanks", "numPipeOps", "regBuff",
    "chunkSize",
)  # fmt: skip
_NVIDIA_RANGE: Final = frozenset(NVIDIA_COLUMNS[1:3])
_MAX_LINE: Final = 255
_MAX_BYTES: Final = 2**62
"""End of an open range: NVIDIA's plugin reads -1 as the largest number, which no row of a plan can hold."""
_COLLECTIVES: Final = {
    Collective.broadcast: "broadcast",
    Collective.reduce: "reduce",
    Collective.all_gather: "allgather",
    Collective.reduce_scatter: "reducescatter",
    Collective.all_reduce: "allreduce",
}
_NVIDIA_TRAPS: Final = (
    "Trap: that plugin presets *nChannels = 1, so whatever no row below covers runs on one channel.",
    "Change that line of plugin.c to 0 (no opinion) before you use it; -1 channels in a row means 1, too.",
    "Its pluginInit also alters NCCL's constants for Blackwell, and 2.27.7 to 2.29.7 misindex the cost table.",
)
_HEADS: Final = {
    "nvidia-csv": (
        "Written by zerotune, for the example plugin of NCCL's plugins/tuner (NCCL_TUNER_CONFIG_FILE).",
        *_NVIDIA_TRAPS,
        ",".join(NVIDIA_COLUMNS),
    ),
    "rccl-csv": (
        "Written by zerotune, for the tuner that is built into RCCL (NCCL_TUNER_CONFIG_FILE).",
        ",".join(NVIDIA_COLUMNS),
    ),
    "ncclx-csv": (
        "Written by zerotune, for the tuner that is built into NCCLX (NCCLX_TUNER_CONFIG_FILE).",
        ",".join(NCCLX_COLUMNS),
    ),
}
_NCCLX_JSON: Final = "ncclx-json"
FORMATS: Final = (*_HEADS, _NCCLX_JSON)


class _Filter(msgspec.Struct, rename="camel", omit_defaults=True):
    collective: str
    bytes_per_rank: str | int = "*"
    n_nodes: str | int = "*"
    n_local_ranks: str | int = "*"
    num_pipe_ops: int = -1
    reg_buff: int = -1


class _Config(msgspec.Struct, rename="camel", omit_defaults=True):
    algorithm: str
    protocol: str
    channels: int = -1
    chunk_size: int = 0


class _Rule(msgspec.Struct):
    """A rule of NCCLX, from JSON or a line of CSV; missing fields mean any."""

    filter: _Filter
    config: _Config


class _Rules(msgspec.Struct):
    rules: list[_Rule]


# ---- writing ------------------------------------------------------------------------------------------------------


def write_table(to: str, rows: Sequence[PlanRow], out: Path, whose: str = "") -> list[str]:
    """Write a plan's rows.

    Args:
        to: one of `FORMATS`.
        whose: words after the number of rows, such as " of job x".

    Returns:
        Remarks for the user: the format's traps, and what it cannot express.

    Raises:
        UserError: the file cannot be written, or NCCLX would read it as a CSV.
    """
    if to == _NCCLX_JSON and out.suffix != ".json":
        raise UserError(f"NCCLX takes {out} for a CSV", "name a file that ends in .json")
    without, n_conflicts = without_phases(rows)
    kept = [row for row in without if _has_counterpart(to, row)]
    with users_file(out) as partial:
        partial.write_text(table_text(to, kept), encoding="ascii")
    remarks = [f"{counted(len(kept), 'row')}{whose} written to {out}.", *(_NVIDIA_TRAPS if to == "nvidia-csv" else ())]
    if n_conflicts:
        ranges = counted(n_conflicts, "size range")
        remarks.append(f"{ranges} would need a choice for each phase, which the table cannot say: the first was kept.")
    if len(kept) < len(without):
        left_out = counted(len(without) - len(kept), "row")
        remarks.append(f"{left_out} left out, without a counterpart in {to}.")
    return remarks


def table_text(to: str, rows: Iterable[PlanRow]) -> str:
    """A table of rows that do not overlap and have a counterpart in the format `to`."""
    if to == _NCCLX_JSON:
        document = msgspec.json.encode(_Rules([_ncclx_rule(row) for row in rows]))
        return msgspec.json.format(document, indent=1).decode() + "\n"
    lines = [f"# {line}" for line in _HEADS[to]]
    lines += [",".join(map(str, _fields_of(to, row))) for row in rows]
    return "\n".join(lines) + "\n"


def _has_counterpart(to: str, row: PlanRow) -> bool:
    is_named = row.collective in _COLLECTIVES and None not in (row.candidate.algorithm, row.candidate.protocol)
    return is_named and not row.candidate.chunk_bytes and (not to.startswith("ncclx") or _per_rank(row) is not None)


def _fields_of(to: str, row: PlanRow) -> Sequence[object]:
    if to == "ncclx-csv":
        place, config = (rule := _ncclx_rule(row)).filter, rule.config
        setting = config.algorithm, config.protocol, config.channels
        last = place.num_pipe_ops, place.reg_buff, config.chunk_size
        return place.collective, place.bytes_per_rank, *setting, place.n_nodes, place.n_local_ranks, *last
    setting = *_named(row.candidate), row.candidate.n_channels or (0 if to == "nvidia-csv" else -1)
    size = row.communicator.n_nodes, row.communicator.n_ranks
    return _COLLECTIVES[row.collective], row.min_bytes, row.max_bytes, *setting, *size, -1, -1


def _ncclx_rule(row: PlanRow) -> _Rule:
    n_nodes, per_rank = row.communicator.n_nodes, _per_rank(row)
    assert per_rank is not None
    place = _Filter(_COLLECTIVES[row.collective], per_rank, n_nodes, row.communicator.n_ranks // n_nodes)
    return _Rule(place, _Config(*_named(row.candidate), row.candidate.n_channels or -1))


def _named(candidate: Candidate) -> tuple[str, str]:
    assert candidate.algorithm is not None
    assert candidate.protocol is not None
    return candidate.algorithm.name, candidate.protocol.name


def _per_rank(row: PlanRow) -> str | None:
    """A row's bytes per rank as an interval; None: it has no whole number of bytes, or nodes are unequal."""
    n_ranks, n_nodes = row.communicator.n_ranks, row.communicator.n_nodes
    low, high = -(-row.min_bytes // n_ranks), row.max_bytes // n_ranks
    return None if n_ranks % n_nodes or low > high else f"[{low},{high}]"


def without_phases(rows: Sequence[PlanRow]) -> tuple[list[PlanRow], int]:
    """Rows whose ranges do not overlap within a collective and communicator, and how many were cut."""
    ordered = sorted(rows, key=lambda row: (row.communicator, row.collective, row.phase or 0, row.min_bytes))
    kept = first_matching(msgspec.structs.replace(row, phase=Phase.other, model_id="") for row in ordered)
    kept.sort(key=lambda row: (row.communicator, row.collective, row.min_bytes))
    n_conflicts = sum(
        any(
            (one.communicator, one.collective) == (row.communicator, row.collective)
            and one.min_bytes <= row.max_bytes
            and row.min_bytes <= one.max_bytes
            and one.candidate != row.candidate
            for one in kept
        )
        for row in ordered
    )
    return kept, n_conflicts


def first_matching(rows: Iterable[PlanRow]) -> list[PlanRow]:
    """Equivalent rows without overlaps: if several rows match a call, a table means the first."""
    kept: list[PlanRow] = []
    taken: dict[tuple[object, ...], list[tuple[int, int]]] = {}  # in order, without adjacent ranges
    for row in rows:
        spans = taken.setdefault((row.communicator, row.collective, row.phase), [])
        begin = bisect.bisect_left(spans, row.min_bytes, key=lambda span: span[1])
        end = bisect.bisect_right(spans, row.max_bytes, key=lambda span: span[0])
        low = row.min_bytes
        for first, last in (*spans[begin:end], (row.max_bytes + 1, row.max_bytes + 1)):
            if low < first:
                kept.append(msgspec.structs.replace(row, min_bytes=low, max_bytes=first - 1))
            low = last + 1
        within = [(row.min_bytes, row.max_bytes), *spans[begin:end]]
        spans[begin:end] = [(min(first for first, _ in within), max(last for _, last in within))]
    return kept


# ---- reading ------------------------------------------------------------------------------------------------------


def read_nvidia_csv(path: Path, communicators: Sequence[CommunicatorClass] = ()) -> list[PlanRow]:
    """Rows of NVIDIA's CSV as its plugin reads them, but names that it would misread are refused.

    Args:
        communicators: the plan's communicators. A row for any number of ranks or nodes (-1) becomes one row for each
            that it matches; it is refused if there are none.

    Returns:
        The rows, in the file's order.

    Raises:
        PlanError: the file cannot be read, or a row is invalid.
    """
    try:
        text = read_file(path, MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read {path}: {reason(error)}", "name a tuner CSV") from error
    rows: list[PlanRow] = []
    for number, line in _lines(text):
        try:
            rows += _nvidia_rows(line, communicators)
        except (UserError, ValueError) as error:
            raise PlanError(f"{path}, line {number}: {error}", f"columns are {','.join(NVIDIA_COLUMNS)}") from error
    return rows


def _nvidia_rows(line: str, communicators: Sequence[CommunicatorClass]) -> Iterable[PlanRow]:
    fields = [field.strip() for field in line.split(",")]
    if not 8 <= len(fields) <= 10 or len(line) > _MAX_LINE:
        raise ValueError(f"{len(fields)} fields in {len(line)} characters")
    if set(fields) >= _NVIDIA_RANGE:
        raise ValueError("it names columns: write # before it, and have the columns in their order")
    min_bytes, max_bytes, n_channels, n_nodes, n_ranks = (_whole(fields[at], at) for at in (1, 2, 5, 6, 7))
    max_bytes = _MAX_BYTES if max_bytes == -1 else min(max_bytes, _MAX_BYTES)
    if not 0 <= min_bytes <= max_bytes:
        raise ValueError(f"{min_bytes}..{max_bytes} bytes are no range")
    collective = catalog.parse_collective(fields[0])
    candidate = _candidate(fields[3], fields[4], n_channels)
    return [
        PlanRow(communicator, collective, Phase.other, min_bytes, max_bytes, candidate)
        for communicator in _matching(n_nodes, n_ranks, communicators)
    ]


def _whole(text: str, column: int) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{NVIDIA_COLUMNS[column]} {text[:40]!r} is no whole number") from None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are no comment, with their numbers."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            yield number, line


def _candidate(algorithm: str, protocol: str, n_channels: int) -> Candidate:
    return Candidate(catalog.parse_algorithm(algorithm), catalog.parse_protocol(protocol), max(n_channels, 0))


def _matching(n_nodes: int, n_ranks: int, communicators: Sequence[CommunicatorClass]) -> Sequence[CommunicatorClass]:
    """The communicators of a row.

    Args:
        n_nodes: the row's nodes; -1: any number.

    Returns:
        The row's own communicator if it names one, else those that it matches.

    Raises:
        ValueError: the numbers are impossible, or no communicator is known.
    """
    if n_nodes >= 1 and n_ranks >= 1:
        return (CommunicatorClass(n_ranks, n_nodes),)
    if not {-1} >= {number for number in (n_nodes, n_ranks) if number < 1}:
        raise ValueError(f"{n_nodes} nodes and {n_ranks} ranks are no communicator (-1 is any number)")
    if not communicators:
        raise ValueError("rows for any number of nodes or ranks need a job whose numbers are known")
    return [one for one in communicators if n_nodes in (-1, one.n_nodes) and n_ranks in (-1, one.n_ranks)]


def is_ncclx(begin: bytes) -> bool:
    """Whether a file with this beginning is NCCLX's: JSON with rules, or a CSV with algorithms in column three."""
    if begin.lstrip().startswith(b"{"):
        return re.match(rb'\s*\{\s*"rules"', begin) is not None
    for _, line in _lines(begin.decode("utf-8", "replace")):
        fields = _fields(line)
        is_named = len(fields) >= 7 and re.fullmatch(r"[a-z_]+", fields[2]) is not None
        return is_named and not set(fields) >= _NVIDIA_RANGE
    return False


def read_ncclx(path: Path, communicators: Sequence[CommunicatorClass] = ()) -> list[PlanRow]:
    """Rows of NCCLX's CSV or JSON. A rule that a plan cannot express is refused.

    Args:
        communicators: as for `read_nvidia_csv`.

    Returns:
        The rows, in the file's order.

    Raises:
        PlanError: the file cannot be read, or a rule is invalid.
    """
    try:
        data = read_file(path, MAX_FILE_BYTES)
        if data.lstrip().startswith(b"{"):
            return list(_ncclx_rows(path, enumerate(msgspec.json.decode(data, type=_Rules).rules, 1), communicators))
        return list(_ncclx_rows(path, _csv_rules(path, data.decode()), communicators))
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise PlanError(f"cannot read {path}: {reason(error)}", "name NCCLX's tuner table") from error


def _csv_rules(path: Path, text: str) -> Iterable[tuple[int, _Rule]]:
    for number, line in _lines(text):
        fields: list[Any] = [*_fields(line), "", "", ""][: len(NCCLX_COLUMNS)]
        try:
            if len(fields) < len(NCCLX_COLUMNS):
                raise ValueError(f"{len(fields) - 3} fields")
            channels, pipe_ops, registered = (int(fields[at] or -1) for at in (4, 7, 8))
            filters = _Filter(fields[0], fields[1], fields[5], fields[6], pipe_ops, registered)
            yield number, _Rule(filters, _Config(fields[2], fields[3], channels, int(fields[9] or 0)))
        except ValueError as error:
            raise PlanError(f"{path}, line {number}: {error}", f"columns are {','.join(NCCLX_COLUMNS)}") from error


def _fields(line: str) -> list[str]:
    """Columns of a line; commas within brackets are part of an interval."""
    return [field.strip() for field in re.split(r",(?![^\[(]*[\])])", line)]


def _ncclx_rows(
    path: Path, rules: Iterable[tuple[int, _Rule]], communicators: Sequence[CommunicatorClass]
) -> Iterable[PlanRow]:
    for number, rule in rules:
        try:
            yield from _rows_of(rule, communicators)
        except (UserError, ValueError) as error:
            raise PlanError(f"{path}, rule or line {number}: {error}", "see docs/reference/formats.md") from error


def _rows_of(rule: _Rule, communicators: Sequence[CommunicatorClass]) -> Iterable[PlanRow]:
    asked, config = rule.filter, rule.config
    n_nodes, n_local = _exact(asked.n_nodes), _exact(asked.n_local_ranks)
    local = [one for one in communicators if n_local in (-1, one.n_ranks // max(1, one.n_nodes))]
    if (asked.num_pipe_ops, asked.reg_buff) != (-1, -1) or config.chunk_size:
        raise ValueError("numPipeOps, regBuff and chunkSize have no counterpart in a plan")
    low, high = _interval(str(asked.bytes_per_rank))
    collective = catalog.parse_collective(asked.collective)
    candidate = _candidate(config.algorithm, config.protocol, config.channels)
    is_exact = min(n_nodes, n_local) >= 1
    for place in _matching(n_nodes, n_nodes * n_local if is_exact else -1, () if is_exact else local or communicators):
        if is_exact or place in local:
            n_ranks = place.n_ranks
            span = min(low * n_ranks, _MAX_BYTES), min(high * n_ranks + n_ranks - 1, _MAX_BYTES)
            yield PlanRow(place, collective, Phase.other, *span, candidate)


def _exact(value: str | int) -> int:
    """The number; -1: any."""
    low, high = _interval(str(value))
    if (low, high) == (0, _MAX_BYTES):
        return -1
    if not 1 <= low == high < 2**20:
        raise ValueError("rows for several numbers of nodes or ranks have no counterpart in a plan")
    return low


def _interval(text: str) -> tuple[int, int]:
    """Smallest and largest whole number from 0 on that `*`, `5`, `[1,5]`, `(1,5]`, `(,5)` ... stands for."""
    text = text.strip()
    if text == "*":
        return 0, _MAX_BYTES
    if re.fullmatch(r"\d{1,19}", text):
        return int(text), int(text)
    found = re.fullmatch(r"([\[(])\s*(\d{0,19})\s*,\s*(\d{0,19})\s*([\])])", text)
    if found is None:
        raise ValueError(f"{text[:40]!r} is no interval")
    low = int(found[2] or 0) + (found[1] == "(" and bool(found[2]))
    high = int(found[3]) - (found[4] == ")") if found[3] else _MAX_BYTES
    if low > high:
        raise ValueError(f"{text[:40]!r} is empty")
    return low, high
