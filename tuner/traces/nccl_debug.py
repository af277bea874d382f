"""NCCL_DEBUG logs of NCCL 2.20 to 2.30 and RCCL: calls (COLL), selections (TUNING), topology (GRAPH, INIT).

COLL lines are one per call and rank; their count is per rank for all_gather and reduce_scatter. TUNING lines
come from rank 0 only; their bytes are total up to 2.23 and per rank from 2.24 on. Where a log has COLL lines,
they become the records and take the setting of the selection with the same collective and bytes, if only one
was made; otherwise the selections themselves are the records. Logs have no durations.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from agent.nccl.catalog import find_collective, parse_algorithm, parse_protocol
from store.errors import UserError
from store.records import Collective
from tuner.traces.files import line_chunks
from tuner.traces.nccl_tables import TableReader
from tuner.traces.records import (
    MAX_BYTES,
    UNKNOWN_U4,
    Block,
    Summary,
    communicator_id,
    datatype_bytes,
    empty_block,
)

_COLL: Final = re.compile(
    rb"([\w.-]+:\d+):\d+ \[\d+\] NCCL INFO (\w+): opCount ([0-9a-f]{1,16}) [^\n]*?count (\d{1,18}) datatype (\d{1,3}) "
    rb"[^\n]*?comm (0x[0-9a-f]+)(?: \[nranks=(\d{1,9})\])?"
)
_TUNING: Final = re.compile(
    rb"([\w.-]+:\d+):\d+ \[\d+\] NCCL INFO (?:(\w+): +)?(\d{1,18}) Bytes ?-> Algo (\w+) +proto (\w+)"
    rb"(?: +channel\{Lo\.\.Hi\}=\{(\d{1,4})\.\.(\d{1,4})\}| +time [\d.]+)"
)
_COMM: Final = re.compile(
    rb"([\w.-]+:\d+):\d+ \[\d+\] NCCL INFO [^\n]*?comm (0x[0-9a-f]+) rank (\d{1,9}) n[rR]anks (\d{1,9})"
    rb"(?: nNodes (\d{1,9}))?(?:[^\n]*?commId (0x[0-9a-f]+))?"
)
_VERSION: Final = re.compile(rb"NCCL version (\d{1,3})\.(\d{1,3})")
_GRAPH: Final = re.compile(
    rb"Pattern (\d+), crossNic (\d+), nChannels (\d+), bw ([\d.]+)/([\d.]+), type (\w+)/(\w+), sameChannels (\d)"
)
_PER_RANK_SINCE: Final = (2, 24)
_SHARDED: Final = (Collective.all_gather, Collective.reduce_scatter)


def matches(begin: bytes) -> bool:
    """NCCL's prefix."""
    return b"NCCL INFO" in begin


@dataclass
class _Communicator:
    rank: int
    n_ranks: int
    n_nodes: int = 0
    comm_id: int = 0


@dataclass
class _Log:
    """What the first reading of a log finds."""

    version: tuple[int, int] = (0, 0)
    communicators: dict[tuple[bytes, bytes], _Communicator] = field(default_factory=dict)
    n_calls: int = 0
    selections: dict[tuple[Collective, int, int], set[tuple[int, int, int]]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """(collective, stated bytes, n_ranks) -> settings chosen."""


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The calls of all ranks in the log, or its selections."""
    log = _survey(path, summary)
    calls: dict[tuple[bytes, ...], int] = {}
    for chunk in line_chunks(path):
        if log.n_calls:
            block = _calls(_COLL.findall(chunk), log, calls, summary)
        else:
            block = _selections(_TUNING.findall(chunk), log, calls, summary)
        if len(block):
            yield block


def _survey(path: Path, summary: Summary) -> _Log:
    log = _Log()
    tables = TableReader()
    tuning: list[tuple[bytes, ...]] = []
    for chunk in line_chunks(path):
        version = _VERSION.search(chunk)
        if version is not None:
            log.version = (int(version[1]), int(version[2]))
            summary.facts["nccl_version"] = f"{log.version[0]}.{log.version[1]}"
        for host, pointer, rank, n_ranks, n_nodes, comm_id in _COMM.findall(chunk):
            known = log.communicators.setdefault((host, pointer), _Communicator(int(rank), int(n_ranks)))
            known.n_nodes = int(n_nodes or 0) or known.n_nodes
            known.comm_id = int(comm_id, 16) & 0xFFFFFFFFFFFFFFFF if comm_id else known.comm_id
        for found in _GRAPH.finditer(chunk):
            _graph(found, summary)
        if b" |" in chunk:
            tables.read(chunk)
        if not log.n_calls and b": opCount " in chunk:
            log.n_calls = sum(1 for _ in _COLL.finditer(chunk))
        if len(tuning) < 1 << 20:
            tuning += set(_TUNING.findall(chunk))
    if tables.cells:
        summary.facts["model_table"] = tables.cells
    for match in set(tuning):
        selected = _selected(match, log, Summary())
        if selected is not None:
            collective, message_bytes, n_ranks, setting = selected
            log.selections[collective, message_bytes, n_ranks].add(setting)
    return log


def _graph(found: re.Match[bytes], summary: Summary) -> None:
    pattern, _, n_channels, intra, inter, type_intra, type_inter, _ = (part.decode() for part in found.groups())
    summary.facts.setdefault("graphs", {})[int(pattern)] = {
        "n_channels": int(n_channels),
        "bw_intra_gbs": float(intra),
        "bw_inter_gbs": float(inter),
        "type_intra": type_intra,
        "type_inter": type_inter,
    }


def _selected(
    match: tuple[bytes, ...], log: _Log, summary: Summary
) -> tuple[Collective, int, int, tuple[int, int, int]] | None:
    """(collective, total bytes, n_ranks, (algorithm, protocol, n_channels)) of a TUNING line."""
    host, name, stated, algorithm_text, protocol_text, low, high = match
    if not name:
        summary.skip("selection without its collective (before 2.23)")
        return None
    collective = find_collective(name.decode())
    try:
        algorithm, protocol = parse_algorithm(algorithm_text.decode()), parse_protocol(protocol_text.decode())
    except UserError:
        collective = None
    if collective is None:
        summary.skip("selection with an unknown name")
        return None
    # One process may have several communicators, and a selection does not say whose it is.
    shapes = {known.n_ranks for (owner, _), known in log.communicators.items() if owner == host and known.rank == 0}
    n_ranks = shapes.pop() if len(shapes) == 1 else 0
    message_bytes = int(stated)
    per_rank = not algorithm_text.isdigit() if log.version == (0, 0) else log.version >= _PER_RANK_SINCE
    if per_rank and collective in _SHARDED:
        if not n_ranks:
            summary.skip("selection of a communicator of unknown ranks")
            return None
        message_bytes *= n_ranks
    n_channels = int(high) - int(low) + 1 if high else 0
    return collective, message_bytes, n_ranks, (algorithm, protocol, n_channels if 0 < n_channels <= 64 else 0)


def _calls(
    matches: list[tuple[bytes, ...]], log: _Log, known_calls: dict[tuple[bytes, ...], int], summary: Summary
) -> Block:
    block = empty_block(len(matches))
    kept = 0
    names: dict[bytes, Collective | None] = {}
    for host, name, op_count, count, datatype, pointer, n_ranks_text in matches:
        if name not in names:
            names[name] = find_collective(name.decode())
        collective = names[name]
        width = datatype_bytes(int(datatype))
        if collective is None or width is None or collective in (Collective.send, Collective.recv):
            summary.skip("point to point or unknown operation")
            continue
        communicator = log.communicators.get((host, pointer))
        n_ranks = int(n_ranks_text) if n_ranks_text else communicator.n_ranks if communicator else 0
        message_bytes = int(count) * width
        if collective in _SHARDED:
            message_bytes *= n_ranks
        if not 0 < message_bytes <= MAX_BYTES:
            summary.skip("bytes unknown")
            continue
        row = block[kept]
        kept += 1
        row["collective"] = collective
        row["message_bytes"] = message_bytes
        row["n_ranks"] = n_ranks
        row["datatype"] = int(datatype)
        row["sequence"] = int(op_count, 16) & UNKNOWN_U4
        if communicator is not None:
            row["rank"] = communicator.rank
            row["n_nodes"] = communicator.n_nodes
            row["comm_id"] = communicator.comm_id or communicator_id(pointer, host)
        else:
            row["comm_id"] = communicator_id(pointer, host)
        settings = log.selections.get((collective, message_bytes, n_ranks))
        if settings is not None and len(settings) == 1:
            row["algorithm"], row["protocol"], row["n_channels"] = next(iter(settings))
    return block[:kept]


def _selections(
    matches: list[tuple[bytes, ...]], log: _Log, known: dict[tuple[bytes, ...], int], summary: Summary
) -> Block:
    """Selections as records: equal lines are looked up once, so that long logs cost little."""
    parsed: dict[tuple[bytes, ...], int] = {}
    distinct: list[tuple[Collective, int, int, tuple[int, int, int], bytes] | None] = []
    picks = []
    for match in matches:
        index = parsed.get(match)
        if index is None:
            index = parsed[match] = len(distinct)
            selected = _selected(match, log, summary)
            distinct.append(None if selected is None else (*selected, match[0]))
        picks.append(index)
    block = empty_block(len(distinct))
    usable = np.zeros(len(distinct), bool)
    for index, entry in enumerate(distinct):
        if entry is None or not 0 < entry[1] <= MAX_BYTES:
            continue
        collective, message_bytes, n_ranks, setting, host = entry
        owners = [one for (owner, _), one in log.communicators.items() if owner == host and one.n_ranks == n_ranks]
        usable[index] = True
        row = block[index]
        row["collective"], row["message_bytes"], row["n_ranks"], row["rank"] = collective, message_bytes, n_ranks, 0
        row["algorithm"], row["protocol"], row["n_channels"] = setting
        if owners:
            row["n_nodes"] = owners[0].n_nodes
            row["comm_id"] = owners[0].comm_id
    chosen = np.array(picks, dtype=np.intp)
    records = block[chosen][usable[chosen]] if len(chosen) else block
    _number(records, known)
    return records


def _number(records: Block, known: dict[tuple[bytes, ...], int]) -> None:
    """Sequence numbers per (communicator, collective), going on from block to block."""
    for comm_id in np.unique(records["comm_id"]):
        for collective in np.unique(records["collective"]):
            mine = (records["comm_id"] == comm_id) & (records["collective"] == collective)
            key = (str(comm_id).encode(), str(collective).encode())
            start = known.get(key, 0)
            n_mine = int(mine.sum())
            records["sequence"][mine] = (start + np.arange(n_mine)) & UNKNOWN_U4
            known[key] = start + n_mine
