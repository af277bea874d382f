"""NCCL_DEBUG logs of NCCL 2.20 to 2.30 and RCCL: calls (COLL), selections (TUNING), communicators (INIT).

Each call has one COLL line per rank; its count is one rank's share if ranks have shares. TUNING lines
come from rank 0 only; their bytes are total up to 2.23 and per rank from 2.24 on. If a log has COLL lines,
they become the records and take the setting of the selection with the same collective and bytes, if only one
was made. Otherwise the selections themselves are the records. Logs have no durations.

In newer releases opCount may stay at 0, and calls of one group share it. If it does not number a rank's calls,
their order on the communicator numbers them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ....agent.nccl.catalog import find_collective, parse_algorithm, parse_protocol
from ....store.errors import UserError
from ..files import line_chunks
from ..left_out import LeftOut
from ..rank_count import SHARED_OUT
from ..records import (
    MAX_BYTES,
    MAX_CHANNELS,
    POINT_TO_POINT,
    UNKNOWN_U1,
    UNKNOWN_U4,
    Block,
    SequenceNumbers,
    Summary,
    communicator_id,
    datatype_bytes,
    empty_block,
)

_COMM: Final = re.compile(
    rb"comm (0x[0-9a-f]+) rank (\d{1,9}) n[rR]anks (\d{1,9})(?: nNodes (\d{1,9}))?(?:[^\n]*?commId (0x[0-9a-f]+))?"
)
_OWNER: Final = re.compile(rb"([^\s:\]>|]+:\d+):\d+ \[\d+\] NCCL INFO ")
_BEGIN: Final = rb"(?<!\S)(?P<head>(?:\S*[\]>|:])?(?P<host>[^\s:\]>|]+:\d+):\d+ \[\d+\] NCCL INFO"
_CALL: Final = re.compile(
    _BEGIN + rb" (?P<name>\w+):) opCount (?P<number>[0-9a-f]{1,16}) sendbuff [^ ]* recvbuff [^ ]* (?:acc [^ ]* )?"
    rb"count (?P<amount>\d{1,18}) (?P<tail>datatype (?P<datatype>\d{1,3}) op \S+ root \S+ comm (?P<comm>0x[0-9a-f]+) "
    rb"\[nranks=(?P<n_ranks>\d{1,9})\])"
)
_CHOICE: Final = re.compile(
    _BEGIN + rb"(?: (?P<name>\w+)(?: \[Symmetric\])?:)?) +(?P<amount>\d{1,18}) Bytes ?-> (?P<tail>"
    rb"Algo (?P<algorithm>\w+) +proto (?P<protocol>\w+) +"
    rb"(?:channel\{Lo\.\.Hi\}=\{(?P<low>\d{1,4})\.\.(?P<high>\d{1,4})\}|time)|Kernel (?P<kernel>\S+))"
)
_CALL_MARK: Final = re.compile(rb": opCount ")
_CHOICE_MARK: Final = re.compile(rb"-> Algo | Bytes -> Kernel ")
_MAX_LINE_BYTES: Final = 4096
"""NCCL's own lines have at most 1,024."""
_VERSION: Final = re.compile(rb"[NR]CCL version(?: :)? (\d{1,3})\.(\d{1,3})")
_PER_RANK_SINCE: Final = (2, 24)
MAX_SELECTIONS: Final = 1 << 20
"""Distinct lines that are kept, so that memory stays bounded."""
MIN_NUMBERED: Final = 4096
"""Calls whose opCount is checked before it is used."""
_ONE_CALLER: Final = ["comm_id", "collective", "rank"]
_NO_SETTING: Final = (UNKNOWN_U1, UNKNOWN_U1, 0)


def matches(begin: bytes) -> bool:
    """Whether lines have NCCL's prefix."""
    return b"NCCL INFO" in begin


@dataclass
class _Communicator:
    rank: int
    n_ranks: int
    n_nodes: int = 0
    comm_id: int = 0

    def agrees(self, other: _Communicator) -> bool:
        """Whether both may describe one communicator."""
        pairs = ((self.n_nodes, other.n_nodes), (self.comm_id, other.comm_id))
        is_one_shape = (self.rank, self.n_ranks) == (other.rank, other.n_ranks)
        return is_one_shape and all(mine == its or not mine or not its for mine, its in pairs)


@dataclass
class _Log:
    """Results of the first reading of a log."""

    version: tuple[int, int] = (0, 0)
    is_mixed: bool = False
    """Whether the log has runs of NCCL before and since 2.24, which count bytes differently."""
    communicators: dict[tuple[bytes, bytes], _Communicator] = field(default_factory=dict)
    """Process and address -> the communicator at this address."""
    earlier: list[tuple[bytes, _Communicator]] = field(default_factory=list)
    """Process -> communicators whose address a later one reused."""
    has_calls: bool = False
    has_numbers: bool = True
    """Whether opCount differs for each of a rank's first calls."""
    process_ranks: dict[bytes, int] = field(default_factory=dict)
    """The rank of each process in its largest communicator, which all its calls get."""
    selections: dict[tuple[int, int, int], set[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(set))
    """(collective, message bytes, n_ranks) -> settings chosen."""


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The calls of all ranks in the log, or its selections."""
    log = _survey(path, summary)
    counters = SequenceNumbers()
    for chunk in _pieces(path, log, summary):
        if log.has_calls:
            block = _calls(chunk, log, summary)
            if not log.has_numbers:
                _number(block, counters)
            if log.selections:
                _apply_selections(block, log)
        else:
            summary.skip(LeftOut.damaged_line, chunk.count(b": opCount "))
            block = _choices(chunk, log, summary)
            _number(block, counters)
        if len(block):
            yield block


def _pieces(path: Path, log: _Log, summary: Summary) -> Iterator[bytes]:
    """Pieces of the file; `log` has the communicators of that time if addresses were reused."""
    if not log.earlier:
        yield from line_chunks(path, summary)
        return
    log.communicators = {}
    for chunk in line_chunks(path, summary):
        at = end = 0
        for line in chunk.split(b"\n"):
            if b"anks " in line and b" comm 0x" in line and b": opCount " not in line:
                yield chunk[at:end]
                at = end
                _communicators(line, log)
            end += len(line) + 1
        yield chunk[at:]


def _survey(path: Path, summary: Summary) -> _Log:
    log = _Log()
    has_selections, n_numbered = False, 0
    for chunk in line_chunks(path):
        # Few pieces of a long log need the patterns. A search for a word is many times faster, and a search for a rare
        # character is faster still.
        for found in _VERSION.finditer(chunk) if b"CCL version" in chunk else ():
            version = int(found[1]), int(found[2])
            log.version = log.version if log.version[0] else version
            log.is_mixed = log.is_mixed or (version >= _PER_RANK_SINCE) != (log.version >= _PER_RANK_SINCE)
            summary.facts["nccl_version"] = f"{log.version[0]}.{log.version[1]}"
        if b"anks " in chunk:
            _communicators(chunk, log)
        if n_numbered < MIN_NUMBERED and log.has_numbers and b": opCount " in chunk:
            block = _calls(chunk, log, Summary())
            log.has_calls = log.has_calls or _CALL.search(chunk) is not None
            n_numbered += len(block)
            log.has_numbers = len(np.unique(block[[*_ONE_CALLER, "sequence"]])) == len(block)
        has_selections = has_selections or (b">" in chunk and b"-> Algo " in chunk)
    log.process_ranks = _process_ranks(log)
    if log.has_calls and has_selections:
        _learn_selections(path, log)
    return log


def _communicators(chunk: bytes, log: _Log) -> None:
    for line in chunk.split(b"\n"):
        if b"anks " not in line or len(line) > _MAX_LINE_BYTES:  # over a long line the patterns take too long
            continue
        for found in _COMM.finditer(line):
            owner = _OWNER.search(line, 0, found.start())
            if owner is not None:
                _communicator(owner[1], found, log)


def _communicator(host: bytes, found: re.Match[bytes], log: _Log) -> None:
    pointer, rank, n_ranks, n_nodes, comm_id = found.groups()
    parsed = _Communicator(
        int(rank), int(n_ranks), int(n_nodes or 0), int(comm_id, 16) & 0xFFFFFFFFFFFFFFFF if comm_id else 0
    )
    known = log.communicators.get((host, pointer))
    if known is not None and not known.agrees(parsed):
        log.earlier.append((host, known))
        known = None
    if known is None:
        log.communicators[host, pointer] = parsed
    else:
        known.n_nodes, known.comm_id = parsed.n_nodes or known.n_nodes, parsed.comm_id or known.comm_id


def _process_ranks(log: _Log) -> dict[bytes, int]:
    """Rank of each process in its largest communicator; a process with several GPUs, hence ranks, is left out."""
    largest: dict[bytes, tuple[int, set[int]]] = {}
    living = ((host, known) for (host, _), known in log.communicators.items())
    for host, known in (*log.earlier, *living):
        n_ranks, ranks = largest.get(host, (0, set()))
        if known.n_ranks > n_ranks:
            largest[host] = known.n_ranks, {known.rank}
        elif known.n_ranks == n_ranks:
            ranks.add(known.rank)
    return {host: ranks.pop() for host, (_, ranks) in largest.items() if len(ranks) == 1}


def _learn_selections(path: Path, log: _Log) -> None:
    """Collect selections before reading any call: a selection may follow its call in the log."""
    for chunk in line_chunks(path):
        if b">" not in chunk or len(log.selections) >= MAX_SELECTIONS:
            continue
        block = _choices(chunk, log, Summary())
        shapes = ["collective", "message_bytes", "n_ranks", "algorithm", "protocol", "n_channels"]
        for collective, message_bytes, n_ranks, *setting in np.unique(block[shapes]).tolist():
            log.selections[collective, message_bytes, n_ranks].add(tuple(setting))


def _calls(chunk: bytes, log: _Log, summary: Summary) -> Block:
    return _records(chunk, _CALL_MARK, _CALL, _call, log, summary)


def _choices(chunk: bytes, log: _Log, summary: Summary) -> Block:
    return _records(chunk, _CHOICE_MARK, _CHOICE, _choice, log, summary)


def _records(
    chunk: bytes,
    mark: re.Pattern[bytes],
    pattern: re.Pattern[bytes],
    describe: Callable[[re.Match[bytes], _Log, Any], int | LeftOut],
    log: _Log,
    summary: Summary,
) -> Block:
    """Records of the lines with a mark. Parts that many lines share are looked up once."""
    n_lines = len(mark.findall(chunk))
    kinds: dict[tuple[bytes, bytes], int] = {}
    examples: list[re.Match[bytes]] = []
    picks, amounts, numbers = [], [], []
    for line in chunk.split(b"\n") if n_lines else ():
        found = pattern.search(line) if len(line) <= _MAX_LINE_BYTES and mark.search(line) else None
        if found is not None:
            kind = kinds.setdefault((found["head"], found["tail"]), len(kinds))
            if kind == len(examples):
                examples.append(found)
            picks.append(kind)
            amounts.append(int(found["amount"]))
            numbers.append(int(found["number"], 16) & UNKNOWN_U4 if pattern is _CALL else 0)
    summary.skip(LeftOut.damaged_line, n_lines - len(picks))
    templates = empty_block(len(kinds))
    factors = np.zeros(len(kinds))
    kind_of = np.array(picks, np.intp)
    n_of_kind = np.bincount(kind_of, minlength=len(kinds))
    for index, example in enumerate(examples):
        factor = describe(example, log, templates[index])
        if isinstance(factor, LeftOut):
            summary.skip(factor, int(n_of_kind[index]))
        factors[index] = -1 if isinstance(factor, LeftOut) else factor
    factors = factors[kind_of]
    message_bytes = np.array(amounts, np.int64) * factors
    sized = (message_bytes > 0) & (message_bytes <= MAX_BYTES)
    summary.skip(LeftOut.bytes_unknown, int(((factors >= 0) & ~sized).sum()))
    block = templates[kind_of]
    block["message_bytes"] = np.where(sized, message_bytes, 0)
    block["sequence"] = numbers
    return block if bool(sized.all()) else block[sized]


def _call(found: re.Match[bytes], log: _Log, row: Any) -> int | LeftOut:
    """Fill in fields that calls of one operation, type and communicator share; returns bytes per count, or a reason."""
    collective, width = find_collective(found["name"].decode()), datatype_bytes(int(found["datatype"]))
    if collective is None or width is None or collective in POINT_TO_POINT:
        return LeftOut.point_to_point_or_unknown
    known, n_ranks = log.communicators.get((found["host"], found["comm"])), int(found["n_ranks"])
    if known is None or known.n_ranks != n_ranks:  # another communicator was at this address
        known = _Communicator(UNKNOWN_U4, n_ranks)
    row["collective"], row["datatype"], row["n_ranks"] = collective, int(found["datatype"]), n_ranks
    row["n_nodes"], row["rank"] = known.n_nodes, log.process_ranks.get(found["host"], known.rank)
    row["comm_id"] = known.comm_id or communicator_id(found["comm"], found["host"])
    return width * (n_ranks if collective in SHARED_OUT else 1)


def _choice(found: re.Match[bytes], log: _Log, row: Any) -> int | LeftOut:
    """Fill in the fields that all selections of one kind share."""
    if not found["name"]:
        return LeftOut.selection_without_collective
    collective, setting = find_collective(found["name"].decode()), _setting(found)
    if collective is None or setting is None:
        return LeftOut.selection_with_unknown_name
    # One process may have several communicators, and a selection does not say whose it is.
    mine = [known for (host, _), known in log.communicators.items() if host == found["host"] and known.rank == 0]
    shapes = {known.n_ranks for known in mine}
    n_ranks = shapes.pop() if len(shapes) == 1 else 0
    is_named = not (found["algorithm"] or b"").isdigit()
    if log.is_mixed and collective in SHARED_OUT:
        return LeftOut.selection_of_several_releases
    per_rank = is_named if log.version == (0, 0) else log.version >= _PER_RANK_SINCE
    if per_rank and collective in SHARED_OUT and not n_ranks:
        return LeftOut.selection_without_ranks
    row["collective"], row["n_ranks"], row["rank"] = collective, n_ranks, 0
    row["algorithm"], row["protocol"], row["n_channels"] = setting
    if n_ranks:
        row["n_nodes"], row["comm_id"] = mine[0].n_nodes, mine[0].comm_id
    return n_ranks if per_rank and collective in SHARED_OUT else 1


def _setting(found: re.Match[bytes]) -> tuple[int, int, int] | None:
    """Algorithm, protocol and channels; unknown for kernels on symmetric memory, None for unknown names."""
    if found["kernel"]:
        return _NO_SETTING
    try:
        algorithm, protocol = parse_algorithm(found["algorithm"].decode()), parse_protocol(found["protocol"].decode())
    except UserError:
        return None
    n_channels = int(found["high"]) - int(found["low"]) + 1 if found["high"] else 0
    return algorithm, protocol, n_channels if 0 < n_channels <= MAX_CHANNELS else 0


def _apply_selections(block: Block, log: _Log) -> None:
    """Give calls the setting of the selection for their collective and bytes, if there is only one."""
    shapes, inverse = np.unique(block[["collective", "message_bytes", "n_ranks"]], return_inverse=True)
    settings = np.empty((len(shapes), 3), np.uint8)
    for index, shape in enumerate(shapes.tolist()):
        chosen = log.selections.get(shape, ())
        settings[index] = next(iter(chosen)) if len(chosen) == 1 else _NO_SETTING
    block["algorithm"], block["protocol"], block["n_channels"] = settings[inverse.ravel()].T


def _number(records: Block, counters: SequenceNumbers) -> None:
    """Sequence numbers per (communicator, collective, rank), which continue over blocks."""
    callers, caller = np.unique(records[_ONE_CALLER], return_inverse=True)
    for index, (comm_id, collective, rank) in enumerate(callers.tolist()):
        mine = caller.ravel() == index
        n_mine = int(np.count_nonzero(mine))
        first = counters.take(comm_id, rank << 8 | collective, n_mine)
        records["sequence"][mine] = (first + np.arange(n_mine)) & UNKNOWN_U4
