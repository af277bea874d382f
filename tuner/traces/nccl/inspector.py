"""NCCL Inspector (2.28 and newer): one JSON object per line and collective.

`coll_msg_size_bytes` is per rank for all_gather and reduce_scatter; times are whole microseconds. NVIDIA's lines lack
algorithm, protocol and data type; AMD's lines for RCCL have `coll_algo`, `coll_proto` and `coll_n_channels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....agent.nccl.catalog import find_collective, parse_algorithm, parse_protocol
from ....store.errors import TraceError, UserError
from ....store.records import Collective, TimingSource
from ....store.wire import FLAG_TIMED
from ..files import line_chunks
from ..left_out import LeftOut
from ..records import MAX_CHANNELS, UNKNOWN_U1, Block, Summary, communicator_id, empty_block


# These objects are short-lived and without cycles, so the garbage collector may skip them (`gc=False`).
class _Header(msgspec.Struct, gc=False):
    id: str | int = ""
    rank: int = 0
    n_ranks: int = 0
    nnodes: int = 0


class _Performance(msgspec.Struct, gc=False):
    coll: str = ""
    coll_sn: int = 0
    coll_msg_size_bytes: int = 0
    coll_exec_time_us: float = 0.0
    coll_timing_source: str = ""
    coll_algo: str = ""
    coll_proto: str = ""
    coll_n_channels: int = 0


class _Line(msgspec.Struct, gc=False):
    header: msgspec.Raw
    """Left undecoded: a file has few distinct headers, and each is decoded once."""
    coll_perf: _Performance | None = None


_decoder: Final = msgspec.json.Decoder(_Line)
_header_decoder: Final = msgspec.json.Decoder(_Header)
_TIMING: Final = {
    "kernel_gpu": TimingSource.gpu_kernel,
    "kernel_cpu": TimingSource.cpu_kernel,
    "collective_cpu": TimingSource.cpu_collective,
}
_IS_PER_RANK: Final = np.zeros(256, bool)
_IS_PER_RANK[[Collective.all_gather, Collective.reduce_scatter]] = True
_LIMIT: Final = 1 << 32
_HEADER_COLUMNS: Final = ("comm_id", "n_ranks", "n_nodes", "rank")
_algorithm: Final = attrgetter("coll_algo")
Numbers = NDArray[np.float64]


def matches(begin: bytes) -> bool:
    """Whether the file has JSON lines with a performance part."""
    return begin.lstrip().startswith(b"{") and b'"coll_perf"' in begin and b'"header"' in begin


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The collectives of one process (all of its communicators)."""
    n_good = n_bad = 0
    for chunk in line_chunks(path, summary):
        try:
            lines = _decoder.decode_lines(chunk)
            block = _block(lines, summary)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            lines, n_damaged = _one_by_one(chunk)
            n_bad += n_damaged
            summary.skip(LeftOut.damaged_line, n_damaged)
            block = _block(lines, summary)
        n_good += len(lines)
        if len(block):
            yield block
    if n_bad and not n_good:
        raise TraceError(f"{path} has no line that NCCL Inspector wrote", "name another file or format")


def _one_by_one(chunk: bytes) -> tuple[list[_Line], int]:
    lines: list[_Line] = []
    n_damaged = 0
    for text in chunk.split(b"\n"):
        if text.strip():
            try:
                line = _decoder.decode(text)
                _header_decoder.decode(line.header)
                lines.append(line)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                n_damaged += 1
    return lines, n_damaged


def _collective(name: str) -> int:
    found = find_collective(name)
    return UNKNOWN_U1 if found is None else int(found)


def _timing_source(name: str) -> int:
    return _TIMING.get(name, TimingSource.reported)


def _comm_id(identity: str | int) -> int:
    try:
        return int(str(identity), 16 if isinstance(identity, str) else 10) & 0xFFFFFFFFFFFFFFFF
    except ValueError:
        return communicator_id(identity)


def _block(lines: list[_Line], summary: Summary) -> Block:
    performances = [line.coll_perf for line in lines if line.coll_perf is not None]
    if len(performances) < len(lines):
        summary.skip(LeftOut.point_to_point, len(lines) - len(performances))
        lines = [line for line in lines if line.coll_perf is not None]
    block = _headers([bytes(line.header) for line in lines])
    collective = _looked_up([one.coll for one in performances], _collective)
    block["collective"] = collective
    message_bytes = _clipped([one.coll_msg_size_bytes for one in performances], 1 << 51)
    message_bytes = np.where(_IS_PER_RANK[collective], message_bytes * block["n_ranks"], message_bytes)
    block["message_bytes"] = np.minimum(message_bytes, 1 << 51)
    block["sequence"] = _clipped([one.coll_sn for one in performances])
    durations = np.array([one.coll_exec_time_us for one in performances])
    timed = (durations > 0) & (durations < 1e12)
    block["duration_us"] = np.where(timed, durations, -1.0)
    sources = _looked_up([one.coll_timing_source for one in performances], _timing_source)
    block["timing_source"] = np.where(timed, sources, TimingSource.none)
    block["flags"] = np.where(timed, FLAG_TIMED, 0)
    if any(map(_algorithm, performances)):
        reported = [(one.coll_algo, one.coll_proto, one.coll_n_channels) for one in performances]
        settings = {words: _setting(*words) for words in set(reported)}
        block["algorithm"], block["protocol"], block["n_channels"] = np.array([settings[words] for words in reported]).T
    known = collective != UNKNOWN_U1
    summary.skip(LeftOut.unknown_operation, int((~known).sum()))
    return block if bool(known.all()) else block[known]


def _headers(texts: list[bytes]) -> Block:
    """Rows with the values of their headers; does not catch the decoder's errors."""
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    rows = empty_block(len(places))
    for name, values in zip(_HEADER_COLUMNS, zip(*map(_header, places), strict=True), strict=False):
        rows[name] = values
    picked: Block = rows[np.fromiter(map(places.__getitem__, texts), np.intp, len(texts))]
    return picked


@lru_cache(maxsize=4096)
def _header(text: bytes) -> tuple[int, ...]:
    header = _header_decoder.decode(text)
    numbers = (header.n_ranks, header.nnodes, header.rank)
    return (_comm_id(header.id), *(min(max(number, 0), _LIMIT - 1) for number in numbers))


def _setting(algorithm: str, protocol: str, n_channels: int) -> tuple[int, int, int]:
    """Algorithm, protocol and channels as in AMD's lines; unknown if a line lacks them."""
    try:
        return parse_algorithm(algorithm), parse_protocol(protocol), n_channels if 0 < n_channels <= MAX_CHANNELS else 0
    except UserError:
        return UNKNOWN_U1, UNKNOWN_U1, 0


def _looked_up(names: list[str], find: Callable[[str], int]) -> NDArray[np.uint8]:
    """The result of `find` for each name; equal names are looked up once."""
    known = {name: find(name) for name in set(names)}
    return np.fromiter(map(known.__getitem__, names), np.uint8, len(names))


def _clipped(values: list[int], limit: int = _LIMIT) -> Numbers:
    """Numbers of any magnitude, clipped to 0 .. limit - 1 (exact up to 2**53)."""
    try:
        numbers = np.array(values, dtype=np.float64)
    except OverflowError:
        numbers = np.array([min(max(value, 0), limit) for value in values], dtype=np.float64)
    return np.clip(numbers, 0, limit - 1)
