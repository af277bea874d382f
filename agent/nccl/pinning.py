"""The algorithms and protocols that NCCL_ALGO and NCCL_PROTO allow; NCCL reads them before it asks a tuner.

An unknown name in them raises `UserError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Final, TypeVar

from ...store.records import Algorithm, Collective, Protocol
from . import catalog

PINNING: Final = ("NCCL_ALGO", "NCCL_PROTO")
NEEDED: Final = (Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce)
"""Collectives of FSDP and ZeRO."""

_Member = TypeVar("_Member", bound=IntEnum)


def unserved(environment: Mapping[str, str]) -> tuple[Collective, ...]:
    """Collectives of sharded training for which the user's settings allow no algorithm on any machine.

    Gradients are averaged, as in FSDP: reduce_scatter has fewer algorithms for averages than for sums.
    """
    collnet = environment.get("NCCL_COLLNET_ENABLE") == "1"
    found = []
    for collective in NEEDED:
        cells = {
            cell
            for n_nodes in (1, 2)
            for cell in catalog.legal_cells(
                collective, n_nodes=n_nodes, collnet=collnet, redop_is_sum=collective is not Collective.reduce_scatter
            )
        }
        if not cells & allowed_cells(environment, collective):
            found.append(collective)
    return tuple(found)


def allowed_cells(environment: Mapping[str, str], collective: Collective) -> frozenset[tuple[Algorithm, Protocol]]:
    """Cells that the user's settings allow for `collective`, whether or not NCCL has them."""
    algorithms = allowed(environment.get("NCCL_ALGO", ""), collective, Algorithm, catalog.parse_algorithm)
    protocols = allowed(environment.get("NCCL_PROTO", ""), collective, Protocol, catalog.parse_protocol)
    return frozenset((algorithm, protocol) for algorithm in algorithms for protocol in protocols)


def allowed(
    text: str, collective: Collective, members: type[_Member], parse: Callable[[str], _Member]
) -> frozenset[_Member]:
    """Members (of `Algorithm` or `Protocol`) that one of the user's settings allows for a collective.

    Args:
        text: the setting: a list, `^` with a list of exclusions, or by function (`ring;allreduce:tree`).
        collective: parts of `text` for other functions do not count.
    """
    left = frozenset(members)
    for part in filter(None, (part.strip() for part in text.split(";"))):
        function, colon, names = part.rpartition(":")
        named = frozenset(parse(name) for name in names.removeprefix("^").split(",") if name.strip())
        if not colon or catalog.find_collective(function) is collective:
            left = frozenset(members) - named if names.startswith("^") else named
    return left
