"""NCCL Inspector (2.28 and newer): one JSON object per line and collective.

`coll_msg_size_bytes` is per rank for all_gather and reduce_scatter; times are whole microseconds. NVIDIA's tells
neither algorithm nor protocol nor data type; AMD's for RCCL tells `coll_algo`, `coll_proto` and `coll_n_channels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np

from agent.nccl.catalog import find_collective, parse_algorithm, parse_protocol
from store.errors import TraceError, UserError
from store.records import Collective, TimingSource
from tuner.traces.files import line_chunks
from tuner.traces.records import FLAG_TIMED, UNKNOWN_U1, Block, Summary, communicator_id, empty_block


# Short-lived and without cycles: the garbage collector need not look at every one (`gc=False`).
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
    header: _Header
    coll_perf: _Performance | None = None


_decoder: Final = msgspec.json.Decoder(_Line)
_TIMING: Final = {
    "kernel_gpu": TimingSource.gpu_kernel,
    "kernel_cpu": TimingSource.cpu_kernel,
    "collective_cpu": TimingSource.cpu_collective,
}
_PER_RANK: Final = (Collective.all_gather, Collective.reduce_scatter)
_LIMIT: Final = 1 << 32
_Name = TypeVar("_Name", str, str | int)


def matches(begin: bytes) -> bool:
    """JSON lines with a performance part."""
    return begin.lstrip().startswith(b"{") and b'"coll_perf"' in begin and b'"header"' in begin


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The collectives of one process (all of its communicators)."""
    n_good = n_bad = 0
    for chunk in line_chunks(path, summary):
        try:
            lines = _decoder.decode_lines(chunk)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            lines, n_damaged = _one_by_one(chunk)
            n_bad += n_damaged
            summary.skip("damaged line", n_damaged)
        n_good += len(lines)
        if lines:
            yield _block(lines, summary)
    if n_bad and not n_good:
        raise TraceError(f"{path} has no line that NCCL Inspector wrote", "name another file or format")


def _one_by_one(chunk: bytes) -> tuple[list[_Line], int]:
    lines: list[_Line] = []
    n_damaged = 0
    for text in chunk.split(b"\n"):
        if text.strip():
            try:
                lines.append(_decoder.decode(text))
            except (msgspec.MsgspecError, ValueError, RecursionError):
                n_damaged += 1
    return lines, n_damaged


def _collective(name: str) -> int:
    found = find_collective(name)
    return UNKNOWN_U1 if found is None else int(found)


def _timing_source(name: str) -> int:
    return _TIMING.get(name, TimingSource.reported)


def _setting(performance: _Performance) -> tuple[int, int, int] | None:
    n_channels = performance.coll_n_channels
    try:
        algorithm, protocol = parse_algorithm(performance.coll_algo), parse_protocol(performance.coll_proto)
    except UserError:
        return None
    return algorithm, protocol, n_channels if 0 < n_channels <= 64 else 0


def _comm_id(identity: str | int) -> int:
    try:
        return int(str(identity), 16 if isinstance(identity, str) else 10) & 0xFFFFFFFFFFFFFFFF
    except ValueError:
        return communicator_id(identity)


def _block(lines: list[_Line], summary: Summary) -> Block:
    performances = [line.coll_perf for line in lines if line.coll_perf is not None]
    if len(performances) < len(lines):
        summary.skip("point to point", len(lines) - len(performances))
        lines = [line for line in lines if line.coll_perf is not None]
    headers = [line.header for line in lines]
    block = empty_block(len(lines))
    block["collective"] = _looked_up([one.coll for one in performances], _collective)
    block["comm_id"] = _looked_up([one.id for one in headers], _comm_id)
    n_ranks = _clipped([one.n_ranks for one in headers])
    message_bytes = _clipped([one.coll_msg_size_bytes for one in performances], 1 << 51)
    per_rank = np.isin(block["collective"], _PER_RANK)
    block["message_bytes"] = np.minimum(np.where(per_rank, message_bytes * n_ranks, message_bytes), 1 << 51)
    block["n_ranks"] = n_ranks
    block["n_nodes"] = _clipped([one.nnodes for one in headers])
    block["rank"] = _clipped([one.rank for one in headers])
    block["sequence"] = _clipped([one.coll_sn for one in performances])
    durations = np.array([one.coll_exec_time_us for one in performances])
    timed = (durations > 0) & (durations < 1e12)
    block["duration_us"] = np.where(timed, durations, -1.0)
    sources = _looked_up([one.coll_timing_source for one in performances], _timing_source)
    block["timing_source"] = np.where(timed, sources, TimingSource.none)
    block["flags"] = np.where(timed, FLAG_TIMED, 0)
    settings = [_setting(one) if one.coll_algo else None for one in performances]
    if any(settings):
        told = np.array([setting is not None for setting in settings])
        for column, values in zip(
            ("algorithm", "protocol", "n_channels"), zip(*filter(None, settings), strict=True), strict=True
        ):
            block[column][told] = values
    known = block["collective"] != UNKNOWN_U1
    summary.skip("unknown operation", int((~known).sum()))
    kept: Block = block[known]
    return kept


def _looked_up(names: list[_Name], find: Callable[[_Name], int]) -> list[int]:
    """`find` of each name, asked once per distinct one."""
    known = {name: find(name) for name in set(names)}
    return [known[name] for name in names]


def _clipped(values: list[int], limit: int = _LIMIT) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Numbers of any magnitude, cut to 0 .. limit - 1 (exact up to 2**53)."""
    return np.clip(np.array(values, dtype=np.float64), 0, limit - 1)
