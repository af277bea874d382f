"""The settings that NCCL offers: legal cells per collective, candidates, and every spelling of their names.

A *cell* is an (algorithm, protocol) pair. The rules are those of NCCL 2.2x. A legal cell can still be IGNORE in a live
cost table; it is never used then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final, TypeVar

from ...store.errors import UserError
from ...store.records import BASELINE, Algorithm, Candidate, Collective, CommunicatorClass, Protocol

Cell = tuple[Algorithm, Protocol]

CHANNEL_LADDER: Final = (1, 2, 4, 8, 16, 24, 32, 64)
NEWEST_MODELLED: Final = (2, 28)
"""NCCL release whose rules apply when the version is unknown."""

_PAT_SINCE = (2, 23)
PAT_AVERAGES_SINCE: Final = (2, 31)
_NVLS_MULTI_NODE_SINCE = (2, 27)

_RING: Final = tuple((Algorithm.ring, protocol) for protocol in Protocol)
_TREE: Final = tuple((Algorithm.tree, protocol) for protocol in Protocol)
TUNABLE: Final = (Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce)
RING_ONLY: Final = (Collective.broadcast, Collective.reduce)
TAKES_CHUNK_SIZE: Final = (Algorithm.tree, Algorithm.ring, Algorithm.pat)
"""As zt_takes_chunk_size of the plugin: other algorithms keep NCCL's own chunk size."""
ASKS_CHUNK_SIZE_SINCE: Final = 6
"""First version of the tuner ABI with which NCCL asks for chunk sizes."""
COMPUTING: Final = frozenset((Collective.reduce_scatter, Collective.all_reduce, Collective.reduce))
"""Collectives that add: another setting may add in another order, and so round differently."""


def legal_cells(
    collective: Collective,
    *,
    n_nodes: int,
    n_ranks: int | None = None,
    nccl_version: tuple[int, ...] | None = None,
    redop_is_sum: bool = True,
    collnet: bool = False,
    nvls: bool = True,
) -> tuple[Cell, ...]:
    """Cells that NCCL accepts for a collective, in the order in which NCCL prefers cells of equal cost.

    There are none if NCCL has no choice.

    Args:
        n_ranks: ranks of the communicator; PAT needs one rank per node; None: unknown, PAT counts as possible.
        nccl_version: (major, minor, ...); None: NEWEST_MODELLED.
        redop_is_sum: False: averages of floats, which NCCL turns into pre-multiplied sums.
    """
    version = tuple((nccl_version or NEWEST_MODELLED)[:2])
    if collective in RING_ONLY:
        return _RING
    if collective not in TUNABLE:
        return ()
    is_all_reduce = collective is Collective.all_reduce
    plain_sum = redop_is_sum or collective is not Collective.reduce_scatter
    cells: list[Cell] = list(_TREE) if is_all_reduce else []
    cells += _RING
    if collnet:
        cells.append((Algorithm.collnet_direct, Protocol.simple))
        if is_all_reduce:
            cells.append((Algorithm.collnet_chain, Protocol.simple))
    if nvls and plain_sum:
        multi_node = collnet and (is_all_reduce or version >= _NVLS_MULTI_NODE_SINCE)
        if n_nodes == 1 or multi_node:
            cells.append((Algorithm.nvls, Protocol.simple))
        if is_all_reduce and n_nodes > 1:
            cells.append((Algorithm.nvls_tree, Protocol.simple))
    one_rank_per_node = n_ranks is None or n_ranks == n_nodes
    by_pat = _PAT_SINCE if plain_sum else PAT_AVERAGES_SINCE
    if not is_all_reduce and version >= by_pat and n_nodes > 1 and one_rank_per_node:
        cells.append((Algorithm.pat, Protocol.simple))
    return tuple(cells)


def candidates(
    collective: Collective,
    communicator: CommunicatorClass,
    max_channels: int,
    *,
    nccl_version: tuple[int, ...] | None = None,
    redop_is_sum: bool = True,
    nvls: bool = False,
    cells: Iterable[Cell] | None = None,
) -> tuple[Candidate, ...]:
    """The baseline (no opinion), then every legal cell with every channel count of CHANNEL_LADDER; see `legal_cells`.

    Args:
        max_channels: the communicator's channels, always one of the channel counts; ValueError unless it is 1 to 64.
        nvls: the machine has NVLink multicast; without effect if `cells` are given.
        cells: the cells that a live cost table offers, of which only legal ones count; None: all legal cells.
    """
    if not 1 <= max_channels <= CHANNEL_LADDER[-1]:
        raise ValueError(f"max_channels {max_channels} is outside 1..{CHANNEL_LADDER[-1]}")
    legal = legal_cells(
        collective,
        n_nodes=communicator.n_nodes,
        n_ranks=communicator.n_ranks,
        nccl_version=nccl_version,
        redop_is_sum=redop_is_sum,
        nvls=nvls or cells is not None,
    )
    if cells is not None:
        offered = set(cells)
        legal = tuple(cell for cell in legal if cell in offered)
    rungs = sorted({rung for rung in CHANNEL_LADDER if rung <= max_channels} | {max_channels})
    return (
        BASELINE,
        *(Candidate(algorithm, protocol, rung) for algorithm, protocol in legal for rung in rungs),
    )


_Name = TypeVar("_Name", bound=IntEnum)


def _key(text: str) -> str:
    return text.strip().lower().replace("-", "").replace("_", "").replace(" ", "").replace("+", "")


def _spellings(members: type[_Name], extra: Mapping[str, _Name]) -> Mapping[str, _Name]:
    return MappingProxyType({**{_key(member.name): member for member in members}, **extra})


_COLLECTIVES: Final = _spellings(
    Collective,
    {
        # torch.distributed, functional collectives, Flight Recorder, Kineto
        "allgatherbase": Collective.all_gather,
        "allgatherintotensor": Collective.all_gather,
        "allgatherintotensorcoalesced": Collective.all_gather,
        "allgatherintotensorout": Collective.all_gather,
        "allgathercoalesced": Collective.all_gather,
        "allgatherv": Collective.all_gather,
        "coalescedallgather": Collective.all_gather,
        "allgathertensor": Collective.all_gather,
        "reducescatterbase": Collective.reduce_scatter,
        "reducescattertensor": Collective.reduce_scatter,
        "reducescattertensorcoalesced": Collective.reduce_scatter,
        "reducescattercoalesced": Collective.reduce_scatter,
        "reducescatterv": Collective.reduce_scatter,
        "coalescedreducescatter": Collective.reduce_scatter,
        "allreducecoalesced": Collective.all_reduce,
        "allreducebase": Collective.all_reduce,
        "allreducesparse": Collective.all_reduce,
        "alltoallbase": Collective.all_to_all,
        "alltoallsingle": Collective.all_to_all,
        "alltoallv": Collective.all_to_all,
        "alltoallsinglev": Collective.all_to_all,
        "alltoallsingleautograd": Collective.all_to_all,
        "broadcastoop": Collective.broadcast,
        "broadcastinplace": Collective.broadcast,
        "broadcastcoalesced": Collective.broadcast,
        "reduceoop": Collective.reduce,
        "isend": Collective.send,
        "irecv": Collective.recv,
        "receive": Collective.recv,
        "sendrecvreplace": Collective.send_recv,
    },
)

_ALGORITHMS: Final = _spellings(
    Algorithm,
    {
        "collnet": Algorithm.collnet_direct,
        "collnetd": Algorithm.collnet_direct,
        "collnetc": Algorithm.collnet_chain,
    },
)

_PROTOCOLS: Final = _spellings(Protocol, {"lowlatency": Protocol.ll, "lowlatency128": Protocol.ll128})

_PREFIXES = ("c10d::", "c10dfunctional::", "nccl:", "nccl_", "nccl", "gloo:", "rccl", "_c10d_functional::")
_SUFFIXES = ("_perf_mpi", "_perf", "_outofplace", "_inplace", "_")


def parse_collective(text: str) -> Collective:
    """A collective from any common spelling: `AllGather`, `_allgather_base`, `nccl:all_reduce`, `4` ...

    Raises UserError for an unknown name.
    """
    found = find_collective(text)
    if found is None:
        raise UserError(f"unknown collective {text[:80]!r}", f"use one of {_names(Collective)}")
    return found


def find_collective(text: str) -> Collective | None:
    """Like `parse_collective`, but None for an unknown name (importers count those)."""
    name = text.strip().lower()
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return _find(_COLLECTIVES, Collective, name)


def parse_algorithm(text: str) -> Algorithm:
    """An algorithm from NCCL's, RCCL's or zerotune's spelling, or NCCL's number; UserError if it is none."""
    found = _find(_ALGORITHMS, Algorithm, text)
    if found is None:
        raise UserError(f"unknown algorithm {text[:80]!r}", f"use one of {_names(Algorithm)}")
    return found


def parse_protocol(text: str) -> Protocol:
    """A protocol from NCCL's, RCCL's or zerotune's spelling, or NCCL's number; UserError if it is none."""
    found = _find(_PROTOCOLS, Protocol, text)
    if found is None:
        raise UserError(f"unknown protocol {text[:80]!r}", f"use one of {_names(Protocol)}")
    return found


def _find(table: Mapping[str, _Name], members: type[_Name], text: str) -> _Name | None:
    name = _key(text)
    if name.isascii() and name.isdigit():
        value = int(name[:4])
        return next((member for member in members if member.value == value), None)
    return table.get(name)


def _names(members: type[_Name]) -> str:
    return ", ".join(member.name for member in members)
