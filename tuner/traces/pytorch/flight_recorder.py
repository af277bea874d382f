"""PyTorch Flight Recorder dumps, JSON (versions 2.3 to 2.10): one file per rank.

Each entry has the sizes of its inputs and outputs in elements. Durations exist only if timing was on;
the time of creation is when the call was enqueued. Only the file's name has the rank.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ....agent.nccl.catalog import find_collective
from ....store.errors import TraceError
from ....store.records import Observation, TimingSource
from ..files import JsonStream
from ..left_out import LeftOut
from ..records import (
    MAX_BYTES,
    POINT_TO_POINT,
    UNKNOWN_U4,
    Block,
    Summary,
    blocks_of,
    communicator_id,
    element_bytes,
    is_impossible,
    sized_call,
)

FACTS: Final = {
    "version": "flight_recorder_version",
    "nccl_version": "nccl_version",
    "comm_lib_version": "nccl_version",  # its name since PyTorch 2.9
}


def matches(begin: bytes) -> bool:
    """Whether the file is a JSON object with process groups, or with entries that have profiling names."""
    if not begin.lstrip().startswith(b"{"):
        return False
    return b'"profiling_name"' in begin or (b'"pg_config"' in begin and b'"version"' in begin)


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The collectives of one rank's dump."""
    groups: Mapping[str, Any] = {}
    # The groups may come after the entries that need them, so the file is read twice.
    first = JsonStream(path, ("entries",))
    seen_entries = False
    for key, value in first.members():
        if key == "entries":
            seen_entries = True
            if isinstance(value, Iterator):
                for _ in value:
                    pass
        elif key == "pg_config" and isinstance(value, Mapping):
            groups = value
        elif key in FACTS:
            summary.facts[FACTS[key]] = value
    if first.truncated:
        summary.fault(f"{path.name} ends early")
    if not seen_entries:
        raise TraceError(f"{path} has no entries", "name a Flight Recorder dump")

    def entries() -> Iterator[Any]:
        for key, value in JsonStream(path, ("entries",)).members():
            if key == "entries" and isinstance(value, Iterator):
                yield from value

    yield from blocks_of(observations(entries(), groups, path, summary))


def observations(
    entries: Iterator[Any], groups: Mapping[str, Any], path: Path, summary: Summary
) -> Iterator[Observation]:
    """Observations from the entries and `pg_config` of a dump in JSON or pickle."""
    rank = rank_of(path)
    if rank is None:
        summary.note(f"{path.name} does not name its rank")
    known = {_text(name): _ranks(group) for name, group in groups.items()}
    for entry in entries:
        observation = _observation(entry, known, rank, summary, path.name)
        if observation is not None:
            yield observation


_RANK_IN_NAME: Final = re.compile(
    r"rank[_-]?(\d{1,9})|(?:dump|worker|[a-z]\.|[_-])(\d{1,9})(?:\.[a-z]|$)", re.IGNORECASE
)


def rank_of(path: Path) -> int | None:
    """The rank in a file's name (`_dump_3.json`, `nccl_trace_rank_3`, `et.3.json`); None if it has none."""
    found = None
    for found in _RANK_IN_NAME.finditer(path.name):
        if found[1]:
            break
    return None if found is None else int(found[1] or found[2])


def _observation(
    entry: Any, groups: Mapping[str, tuple[int, ...] | None], rank: int | None, summary: Summary, file_name: str
) -> Observation | None:
    if not isinstance(entry, Mapping):
        summary.skip(LeftOut.no_entry)
        return None
    name = entry.get("profiling_name")
    collective = find_collective(name.split(" ")[0]) if isinstance(name, str) else None
    if entry.get("is_p2p") is True or collective in POINT_TO_POINT:
        summary.skip(LeftOut.point_to_point)
        return None
    if collective is None:
        summary.skip(LeftOut.unknown_operation, 1, repr(_text(name)[:40]))
        return None
    group_name, group_text = _group(entry)
    ranks = groups.get(group_name)
    if ranks and rank is not None and rank not in ranks:
        summary.note(f"{file_name}: its name says rank {rank}, but its groups are without it: the rank is unknown")
        rank = None
    sides = [(entry.get(f"{side}_sizes"), entry.get(f"{side}_dtypes")) for side in ("input", "output")]
    if any(_is_damaged(sizes) for sizes, _ in sides):
        summary.skip(LeftOut.impossible_size)
        return None
    by_source = {"its group": len(ranks or ())}
    both_bytes = [_side_bytes(sizes, dtypes) for sizes, dtypes in sides]
    message_bytes, n_ranks = sized_call(collective, both_bytes, by_source, summary, file_name)
    if not message_bytes:
        summary.skip(LeftOut.bytes_unknown)
        return None
    duration_ms = entry.get("duration_ms")
    timed = isinstance(duration_ms, int | float) and 0 < duration_ms < 1e9
    created = entry.get("time_created_ns")
    return Observation(
        sequence=_small(entry.get("collective_seq_id", entry.get("seq_id"))),
        collective=collective,
        message_bytes=message_bytes,
        n_ranks=n_ranks,
        rank=UNKNOWN_U4 if rank is None else rank,
        comm_id=communicator_id(group_text, ranks or ""),
        datatype=_datatype_name(entry),
        start_ns=created if isinstance(created, int) and 0 < created < 1 << 62 else None,
        duration_us=float(duration_ms) * 1000.0 if timed and duration_ms is not None else None,
        timing_source=TimingSource.reported if timed else TimingSource.none,
    )


def _group(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Key into pg_config, and the text that identifies the group."""
    group = entry.get("process_group")
    if isinstance(group, Sequence) and not isinstance(group, str) and group:
        return _text(group[0]), " ".join(_text(part) for part in group[:2])
    return _text(entry.get("pg_id")), _text(entry.get("pg_id"))


def _text(value: Any) -> str:
    """Text, or an integer as text; empty for other types, as a hostile container's text could be endless."""
    return str(value)[:200] if isinstance(value, str) or type(value) is int else ""


def _ranks(group: Any) -> tuple[int, ...] | None:
    """Global ranks of a pg_config entry; older dumps write the list as text."""
    ranks = group.get("ranks") if isinstance(group, Mapping) else None
    if isinstance(ranks, str) and len(ranks) < 1 << 20:
        try:
            ranks = json.loads(ranks)
        except (ValueError, RecursionError):
            return None
    if not isinstance(ranks, Sequence) or not ranks or not all(type(rank) is int for rank in ranks):
        return None
    return tuple(ranks)


def _is_damaged(sizes: Any) -> bool:
    """Whether the inputs or the outputs have an impossible size."""
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        return False
    return any(
        is_impossible(dim) for dims in sizes if isinstance(dims, Sequence) and not isinstance(dims, str) for dim in dims
    )


def _side_bytes(sizes: Any, dtypes: Any) -> int | None:
    """Bytes of all tensors on one side; None: unknown."""
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        return None
    dtypes = dtypes if isinstance(dtypes, Sequence) and not isinstance(dtypes, str) else [dtypes]
    total = 0
    for position, dims in enumerate(sizes):
        name = dtypes[min(position, len(dtypes) - 1)] if dtypes else None
        width = element_bytes(name)
        if width is None or not isinstance(dims, Sequence) or isinstance(dims, str) or len(dims) > 64:
            return None
        if not all(type(dim) is int and 0 <= dim <= MAX_BYTES for dim in dims):
            return None
        total += math.prod(dims) * width
    return total if total <= MAX_BYTES else None


def _datatype_name(entry: Mapping[str, Any]) -> str | None:
    for key in ("input_dtypes", "output_dtypes"):
        names = entry.get(key)
        if isinstance(names, Sequence) and not isinstance(names, str) and names and isinstance(names[0], str):
            return names[0]
    return None


def _small(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= UNKNOWN_U4 else 0
