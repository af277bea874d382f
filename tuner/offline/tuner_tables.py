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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ...store.atomic_file import users_file
from ...store.counted import counted
from ...store.errors import UserError
from ...store.records import Candidate, Collective, Phase, PlanRow

NVIDIA_COLUMNS: Final = (
    "collective_type", "min_bytes", "max_bytes", "algorithm", "protocol", "channels", "nNodes", "nRanks",
    "numPipeOps", "regBuff",
)  # fmt: skip
NCCLX_COLUMNS: Final = (
    "collective", "bytesPerRank", "algorithm", "protocol", "channels", "nNodes", "nLocalRanks", "numPipeOps", "regBuff",
    "chunkSize",
)  # fmt: skip
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
    """Write a plan's rows; returns remarks on the format's traps and on what it cannot express.

    Args:
        to: one of `FORMATS`.
        whose: words after the number of rows, such as " of job x".

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


