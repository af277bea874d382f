"""Facts of nccl-tests' runs that its printed tables and its JSON share."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Final

from ....agent.nccl.catalog import find_collective, parse_algorithm, parse_protocol
from ....store.errors import UserError
from ....store.records import BASELINE, Candidate, Collective
from ..rank_count import RunRanks
from ..records import Block, communicator_id

MAX_DEVIATION: Final = 1e-3
_REDUCING: Final = (Collective.all_reduce, Collective.reduce_scatter, Collective.reduce)
_MARGIN: Final = 0.1
"""Means over runs, and GiB/s read as GB/s, differ by less; another unit of time differs by a thousand."""
_LAST_DIGIT_GBS: Final = 0.01
"""Last printed digit of bandwidths, which have two places."""
_BYTES_PER_US: Final = 1e3
"""Bytes per microsecond of one GB/s."""


def with_ranks(block: Block, run: RunRanks, n_runs: int = 0) -> None:
    """Write a run's ranks and nodes into its records."""
    n_ranks = 0 if run.count is None else run.count.n_ranks
    block["n_ranks"], block["n_nodes"] = n_ranks, run.n_nodes
    block["comm_id"] = communicator_id("nccl-tests", n_runs, n_ranks)


def contradiction(message_bytes: int, duration_us: float, algbw_gbs: float) -> str | None:
    """The row in words if its time is not its size divided by its algorithm bandwidth; None if they agree."""
    expected_gbs = message_bytes / (_BYTES_PER_US * duration_us)
    if not abs(algbw_gbs - expected_gbs) > _MARGIN * max(expected_gbs, algbw_gbs) + _LAST_DIGIT_GBS:
        return None
    return f"{message_bytes} bytes in {duration_us:g} us at {algbw_gbs:g} GB/s"


@lru_cache(maxsize=64)
def forced_setting(nccl_algo: str, nccl_proto: str, collective: Collective | None) -> Candidate:
    """The setting that the environment forced, if it names one algorithm, and perhaps one protocol.

    Since NCCL 2.24 the variables may differ by collective ("ring;allreduce:tree").
    """
    algorithm = _for_collective(nccl_algo, collective)
    if not algorithm:
        return BASELINE
    protocol = _for_collective(nccl_proto, collective)
    try:
        named = parse_algorithm(algorithm)
    except UserError:
        return BASELINE
    try:
        return Candidate(named, parse_protocol(protocol) if protocol else None)
    except UserError:
        return Candidate(named)


def _for_collective(value: str, collective: Collective | None) -> str:
    """The part for this collective of a list by collective; "" if there is none."""
    found = ""
    for part in value.split(";"):
        name, has_name, rest = part.rpartition(":")
        if not has_name:
            found = rest
        elif collective is not None and find_collective(name) is collective:
            return rest
    return found.strip()


def named_in(path: Path) -> Collective | None:
    """The collective in a file's name, if it names exactly one."""
    first = find_collective(re.split(r"[.]|__|_quiet", path.name)[0].removeprefix("nccl_"))
    found = {
        collective
        for word in ("all_reduce", "all_gather", "reduce_scatter", "allreduce", "allgather", "reducescatter")
        if word in path.name.lower() and (collective := find_collective(word)) is not None
    }
    return first or (found.pop() if len(found) == 1 else None)


def fits(collective: Collective | None, redop: bytes | str | None) -> bool:
    """Whether a collective may have this entry in the column of reductions."""
    return collective is None or not redop or (redop not in (b"none", "none")) == (collective in _REDUCING)


def is_right(text: str | bytes | None) -> bool:
    """Whether there are no wrong results; old versions print the largest deviation instead of a number."""
    if text in (b"N/A", "N/A"):
        return True
    try:
        return text is not None and 0 <= float(text) <= MAX_DEVIATION
    except ValueError:
        return False
