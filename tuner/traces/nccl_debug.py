"""NCCL_DEBUG logs of NCCL 2.20 to 2.30 and RCCL: calls (COLL), selections (TUNING), topology (GRAPH, INIT).

COLL lines are one per call and rank; their count is per rank for all_gather and reduce_scatter. TUNING lines
come from rank 0 only; their bytes are total up to 2.23 and per rank from 2.24 on. Where a log has COLL lines,
they become the records and take the setting of the selection with the same collective and bytes, if only one
was made; otherwise the selections themselves are the records. Logs have no durations.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from agent.nccl.catalog import find_collective, parse_algorithm, parse_protocol
from store.errors import UserError
from store.records import Collective
from tuner.traces.files import line_chunks
from tuner.traces.nccl_tables import TableReader
from tuner.traces.records import (
    MAX_BYTES,
    UNKNOWN_U1,
    UNKNOWN_U4,
    Block,
    Summary,
    communicator_id,
    datatype_bytes,
    empty_block,
)

# The patterns of frequent lines begin with the line break, which the regular-expression engine finds fastest;
# a launcher's or NCCL's own time stamp may stand before NCCL's prefix. What calls of one kind have in common stands
# in two groups, so that it is looked into once per kind.
_STAMP: Final = rb"\n(?:\[[^\]\n]*\](?:<\w+>:?)? ?)?"
_COLL: Final = re.compile(
    _STAMP + rb"([^\s:]+:\d+:\d+ \[\d+\] NCCL INFO \w+): opCount ([0-9a-f]{1,16}) sendbuff \S+ recvbuff \S+ "
    rb"(?:acc \S+ )?count (\d{1,18}) (datatype \d{1,3} op \S+ root \S+ comm 0x[0-9a-f]+(?: \[nranks=\d{1,9}\])?)"
)
_COLL_HEAD: Final = re.compile(rb"([^\s:]+:\d+):\d+ \[\d+\] NCCL INFO (\w+)")
_COLL_TAIL: Final = re.compile(rb"datatype (\d+) op \S+ root \S+ comm (0x[0-9a-f]+)(?: \[nranks=(\d+)\])?")
_TUNING: Final = re.compile(
    _STAMP + rb"([^\s:]+:\d+):\d+ \[\d+\] NCCL INFO ((?:\w+: +)?\d{1,18} Bytes ?-> Algo \w+ +proto \w+)"
    rb"(?: +(channel\{Lo\.\.Hi\}=\{\d{1,4}\.\.\d{1,4}\})| +time [\d.]+)"
)
_SELECTION: Final = re.compile(rb"(?:(\w+): +)?(\d+) Bytes ?-> Algo (\w+) +proto (\w+)")
_CHANNELS: Final = re.compile(rb"(\d+)\.\.(\d+)\}$")
_COMM: Final = re.compile(
    rb"comm (0x[0-9a-f]+) rank (\d{1,9}) n[rR]anks (\d{1,9})(?: nNodes (\d{1,9}))?(?:[^\n]*?commId (0x[0-9a-f]+))?"
)
_OWNER: Final = re.compile(rb"([^\s:]+:\d+):\d+ \[\d+\] NCCL INFO ")
_VERSION: Final = re.compile(rb"NCCL version (\d{1,3})\.(\d{1,3})")
_GRAPH: Final = re.compile(
    rb"Pattern (\d+), crossNic (\d+), nChannels (\d+), bw ([\d.]+)/([\d.]+), type (\w+)/(\w+), sameChannels (\d)"
)
_PER_RANK_SINCE: Final = (2, 24)
MAX_SELECTIONS: Final = 1 << 20
"""Distinct ones that are looked into, so that memory stays bounded."""
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
    has_calls: bool = False
    selections: dict[tuple[Collective, int, int], set[tuple[int, int, int]]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """(collective, stated bytes, n_ranks) -> settings chosen."""


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The calls of all ranks in the log, or its selections."""
    log = _survey(path, summary)
    calls: dict[tuple[bytes, ...], int] = {}
    for chunk in line_chunks(path, summary):
        if log.has_calls:
            block = _calls(_COLL.findall(b"\n" + chunk), log, summary)
        else:
            block = _selections(_TUNING.findall(b"\n" + chunk), log, calls, summary)
        if len(block):
            yield block


def _survey(path: Path, summary: Summary) -> _Log:
    log = _Log()
    tables = TableReader()
    has_selections = False
    for chunk in line_chunks(path):
        # Few pieces of a long log need the patterns; a search for a word is many times as fast, one for a rare
        # character faster still.
        version = _VERSION.search(chunk) if b"NCCL version" in chunk else None
        if version is not None:
            log.version = (int(version[1]), int(version[2]))
            summary.facts["nccl_version"] = f"{log.version[0]}.{log.version[1]}"
        if b" nranks " in chunk or b" nRanks " in chunk:
            _communicators(chunk, log)
        if b"P" in chunk and b"Pattern " in chunk:
            for graph in _GRAPH.finditer(chunk):
                _graph(graph, summary)
        if b"|" in chunk:
            tables.read(chunk)
        if not log.has_calls and b": opCount " in chunk:
            log.has_calls = _COLL.search(b"\n" + chunk) is not None
        has_selections = has_selections or (b">" in chunk and b"-> Algo " in chunk)
    if tables.cells:
        summary.facts["model_table"] = tables.cells
    if log.has_calls and has_selections:
        _learn_selections(path, log)
    return log


def _communicators(chunk: bytes, log: _Log) -> None:
    for found in _COMM.finditer(chunk):
        owner = _OWNER.search(chunk, chunk.rfind(b"\n", 0, found.start()) + 1, found.start())
        if owner is None:
            continue
        host, (pointer, rank, n_ranks, n_nodes, comm_id) = owner[1], found.groups()
        known = log.communicators.setdefault((host, pointer), _Communicator(int(rank), int(n_ranks)))
        known.n_nodes = int(n_nodes or 0) or known.n_nodes
        known.comm_id = int(comm_id, 16) & 0xFFFFFFFFFFFFFFFF if comm_id else known.comm_id


def _learn_selections(path: Path, log: _Log) -> None:
    """What was chosen for which bytes; selections stand in the log before or after the calls that they are of."""
    distinct: set[tuple[bytes, ...]] = set()
    for chunk in line_chunks(path):
        if b">" in chunk and len(distinct) < MAX_SELECTIONS:
            distinct.update(_TUNING.findall(b"\n" + chunk))
    for match in distinct:
        selected = _selected(match, log, Summary())
        if selected is not None:
            collective, message_bytes, n_ranks, setting = selected
            log.selections[collective, message_bytes, n_ranks].add(setting)


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
    host, text, channels_text = match
    parts, channels = _SELECTION.fullmatch(text), _CHANNELS.search(channels_text)
    assert parts is not None
    name, stated, algorithm_text, protocol_text = parts.groups()
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
    n_channels = int(channels[2]) - int(channels[1]) + 1 if channels else 0
    return collective, message_bytes, n_ranks, (algorithm, protocol, n_channels if 0 < n_channels <= 64 else 0)


class _CallKind(NamedTuple):
    """What all calls of one operation, type and communicator have in common; None in the table = not usable."""

    collective: Collective
    bytes_per_count: int
    datatype: int
    n_ranks: int
    n_nodes: int
    rank: int
    comm_id: int


def _kind(head: bytes, tail: bytes, log: _Log) -> _CallKind | None:
    """From what stands before and after a call's own numbers."""
    begin, end = _COLL_HEAD.fullmatch(head), _COLL_TAIL.fullmatch(tail)
    assert begin is not None
    assert end is not None
    (host, name), (datatype, pointer, n_ranks_text) = begin.groups(), end.groups()
    collective, width = find_collective(name.decode()), datatype_bytes(int(datatype))
    if collective is None or width is None or collective in (Collective.send, Collective.recv):
        return None
    known = log.communicators.get((host, pointer), _Communicator(UNKNOWN_U4, 0))
    n_ranks = int(n_ranks_text) if n_ranks_text else known.n_ranks
    return _CallKind(
        collective,
        width * (n_ranks if collective in _SHARDED else 1),
        int(datatype),
        n_ranks,
        known.n_nodes,
        known.rank,
        known.comm_id or communicator_id(pointer, host),
    )


def _calls(matches: list[tuple[bytes, ...]], log: _Log, summary: Summary) -> Block:
    """All columns that do not change from call to call are looked up once per kind of call."""
    if not matches:
        return empty_block(0)
    heads, op_counts, counts, tails = zip(*matches, strict=True)
    keys = list(zip(heads, tails, strict=True))
    distinct = {key: index for index, key in enumerate(set(keys))}
    kinds = [_kind(*key, log) for key in distinct]
    usable = np.array([kind is not None for kind in kinds])
    templates = empty_block(len(kinds))
    factors = np.zeros(len(kinds))
    for template, kind, index in zip(templates, kinds, range(len(kinds)), strict=True):
        if kind is not None:
            factors[index] = kind.bytes_per_count
            template["collective"], template["datatype"], template["n_ranks"] = (
                kind.collective,
                kind.datatype,
                kind.n_ranks,
            )
            template["n_nodes"], template["rank"], template["comm_id"] = kind.n_nodes, kind.rank, kind.comm_id
    picks = np.array(list(map(distinct.__getitem__, keys)), dtype=np.intp)
    block = templates[picks]
    message_bytes = np.array(list(map(int, counts)), dtype=np.float64) * factors[picks]
    sized = (message_bytes > 0) & (message_bytes <= MAX_BYTES)
    block["message_bytes"] = np.where(sized, message_bytes, 0)
    block["sequence"] = np.array([int(text, 16) for text in op_counts], dtype=np.uint64).astype(np.uint32)
    is_usable = usable[picks]
    kept = is_usable & sized
    summary.skip("point to point or unknown operation", int((~is_usable).sum()))
    summary.skip("bytes unknown", int((is_usable & ~sized).sum()))
    if not bool(kept.all()):
        block = block[kept]
    if log.selections:
        _apply_selections(block, log)
    return block


def _apply_selections(block: Block, log: _Log) -> None:
    """Gives calls the setting of the selection for their collective and bytes, if there was only one."""
    shapes, inverse = np.unique(block[["collective", "message_bytes", "n_ranks"]], return_inverse=True)
    settings = np.zeros((len(shapes), 3), np.uint8)
    settings[:, :2] = UNKNOWN_U1
    for index, (collective, message_bytes, n_ranks) in enumerate(shapes.tolist()):
        chosen = log.selections.get((collective, message_bytes, n_ranks))
        if chosen is not None and len(chosen) == 1:
            settings[index] = next(iter(chosen))
    block["algorithm"], block["protocol"], block["n_channels"] = settings[inverse.ravel()].T


def _selections(
    matches: list[tuple[bytes, ...]], log: _Log, known: dict[tuple[bytes, ...], int], summary: Summary
) -> Block:
    """Selections as records: equal lines are looked up once, so that long logs cost little."""
    counts = Counter(matches)
    distinct = {match: index for index, match in enumerate(counts)}
    block = empty_block(len(distinct))
    usable = np.zeros(len(distinct), bool)
    for match, index in distinct.items():
        trouble = Summary()
        selected = _selected(match, log, trouble)
        for reason in trouble.unusable:
            summary.skip(reason, counts[match])
        if selected is None or not 0 < selected[1] <= MAX_BYTES:
            continue
        collective, message_bytes, n_ranks, setting = selected
        owners = [one for (owner, _), one in log.communicators.items() if owner == match[0] and one.n_ranks == n_ranks]
        usable[index] = True
        row = block[index]
        row["collective"], row["message_bytes"], row["n_ranks"], row["rank"] = collective, message_bytes, n_ranks, 0
        row["algorithm"], row["protocol"], row["n_channels"] = setting
        if owners:
            row["n_nodes"] = owners[0].n_nodes
            row["comm_id"] = owners[0].comm_id
    chosen = np.array(list(map(distinct.__getitem__, matches)), dtype=np.intp)
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
