"""The setting that NCCL_ALGO and NCCL_PROTO forced, as far as they name one."""

from __future__ import annotations

from functools import lru_cache

from zerotune.agent.nccl.catalog import find_collective, parse_algorithm, parse_protocol
from zerotune.store.errors import UserError
from zerotune.store.records import BASELINE, Candidate, Collective


@lru_cache(maxsize=64)
def forced_setting(nccl_algo: str, nccl_proto: str, collective: Collective | None) -> Candidate:
    """What the environment forced, as far as it names one thing only: an algorithm, then perhaps a protocol.

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
    """The part of a list by collective that holds for this one; "" without any."""
    found = ""
    for part in value.split(";"):
        name, has_name, rest = part.rpartition(":")
        if not has_name:
            found = rest
        elif collective is not None and find_collective(name) is collective:
            return rest
    return found.strip()
