"""Latency and bandwidth of each cell in NCCL 2.28.9's cost model, from its tuning tables and a fabric's topology."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ...store.records import Algorithm, Collective, Protocol

N_ALGORITHMS: Final = 7
N_PROTOCOLS: Final = 3
PATH_NVL: Final = 1
PATH_NVB: Final = 2
PATH_PXB: Final = 5
PATH_PXN: Final = 7

# Columns: Volta, Ampere, Hopper, Blackwell; rows: 1, 2, 3 and more nodes.
_LL_MAX_GBS = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0))
_RING_LL128_GBS = ((20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (36.7, 36.7, 36.7), (73.4, 34.6, 73.4))
_TREE_LL128_GBS = ((20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (36.7, 36.7, 29.0), (55.6, 31.67, 20.0))
_TREE_GBS = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))

# By protocol: LL, LL128, Simple.
_BASE_US = {
    Algorithm.tree: (6.8, 14.0, 8.4),
    Algorithm.ring: (6.6, 14.0, 8.4),
    Algorithm.pat: (8.0, 8.0, 8.0),
}
_NVLINK_US = {Algorithm.tree: (0.6, 1.25, 4.0), Algorithm.ring: (0.6, 1.9, 3.4)}
_PCI_US = {Algorithm.tree: (1.0, 1.9, 4.0), Algorithm.ring: (1.0, 2.5, 5.7)}
_NET_US = {
    Algorithm.tree: (5.0, 8.5, 14.0),
    Algorithm.ring: (2.7, 4.0, 14.0),
    Algorithm.pat: (0.0, 0.0, 14.0),
}

_PAT_IS_BETWEEN_NODES_SINCE: Final = (2, 31)
"""Older releases give PAT on two nodes the bandwidth within a node."""
_PAT_LOSES_A_QUARTER_SINCE: Final = (2, 24)


class StatedCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Terms of a cell that this model does not compute: NVLink multicast, or a cell that newer releases changed."""

    collective: Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"]
    algorithm: Literal["tree", "ring", "nvls", "nvls_tree", "pat"]
    protocol: Literal["ll", "ll128", "simple"]
    latency_us: Annotated[float, msgspec.Meta(ge=0)]
    gbs: Annotated[float, msgspec.Meta(ge=0)]
    """Of the whole buffer; 0: NCCL does not have the cell."""


class Topology(msgspec.Struct, frozen=True):
    """NCCL's data about one communicator's hardware; rates in GB/s, latencies in microseconds.

    `compute_capability` is ten times the CUDA number (90 = Hopper). `type_intra` and `type_inter` are NCCL's
    path types (NVL 1, NVB 2, PIX 4, PXB 5, PXN 7, PHB 8, SYS 9); `type_inter` is 0 on a single node.
    `comm_channels` is the communicator's final number of channels. Ring and tree channels are those of the topology
    search, for the bandwidth terms. `same_channels`: all rings take the same path. NVLS stays IGNORE unless
    `nvls_gbs` (bandwidth of the whole buffer, for all collectives) is positive or `stated_cells` have it.
    """

    n_ranks: int
    n_nodes: int
    compute_capability: int
    ring_channels: int
    ring_bw_intra_gbs: float
    ring_bw_inter_gbs: float
    latency_inter_us: float
    type_intra: int
    type_inter: int
    tree_channels: int
    tree_bw_intra_gbs: float
    tree_bw_inter_gbs: float
    comm_channels: int
    cpu_is_amd: bool = False
    plain_tree_pattern: bool = False
    same_channels: bool = True
    nvls_gbs: float = 0.0
    nvls_latency_us: float = 0.0
    nvls_channels: int = 0
    stated_cells: tuple[StatedCell, ...] = ()
    nccl_version: tuple[int, int] = (2, 28)
    """Major and minor number; releases from 2.23 on differ in PAT's bandwidth."""

    def __post_init__(self) -> None:
        if not 1 <= self.n_nodes <= self.n_ranks:
            raise ValueError(f"n_nodes {self.n_nodes} is not within 1..n_ranks {self.n_ranks}")
        if self.comm_channels < 1:
            raise ValueError(f"comm_channels {self.comm_channels} is not positive")

    @property
    def has_nvls(self) -> bool:
        """Whether NCCL can use NVLink multicast."""
        return self.nvls_gbs > 0 or any(cell.algorithm in ("nvls", "nvls_tree") for cell in self.stated_cells)


class CellTerms(NamedTuple):
    """Terms of every cell, float32 [7, 3]: latency in us, bandwidth in GB/s (0 = IGNORE)."""

    latency_us: npt.NDArray[np.float32]
    bandwidth_gbs: npt.NDArray[np.float32]


@lru_cache(maxsize=4096)
def terms_of(topology: Topology, collective: Collective) -> CellTerms:
    """Terms of all cells of a collective; computed once."""
    latency_us = np.zeros((N_ALGORITHMS, N_PROTOCOLS), dtype=np.float32)
    bandwidth_gbs = np.zeros((N_ALGORITHMS, N_PROTOCOLS), dtype=np.float32)
    ll128 = _ll128_is_on(topology)
    if topology.n_ranks > 1:
        for protocol in Protocol:
            if protocol is Protocol.ll128 and not ll128:
                continue
            if collective in _RING_COLLECTIVES:
                latency_us[Algorithm.ring, protocol] = _ring_latency_us(topology, collective, protocol)
                bandwidth_gbs[Algorithm.ring, protocol] = _ring_gbs(topology, collective, protocol)
            if collective is Collective.all_reduce:
                latency_us[Algorithm.tree, protocol] = _tree_latency_us(topology, protocol)
                bandwidth_gbs[Algorithm.tree, protocol] = _tree_gbs(topology, protocol)
        if collective in _GATHER_OR_SCATTER and topology.n_ranks == topology.n_nodes:
            latency_us[Algorithm.pat, Protocol.simple] = _pat_latency_us(topology)
            intra_gbs = topology.tree_bw_intra_gbs
            if topology.nccl_version >= _PAT_IS_BETWEEN_NODES_SINCE:
                intra_gbs = topology.tree_bw_inter_gbs
            share = 0.75 if topology.nccl_version >= _PAT_LOSES_A_QUARTER_SINCE else 0.85
            bandwidth_gbs[Algorithm.pat, Protocol.simple] = share * _search_gbs(
                topology, topology.tree_channels, intra_gbs, topology.tree_bw_inter_gbs
            )
        if collective in _NVLS_COLLECTIVES and topology.nvls_gbs > 0:
            latency_us[Algorithm.nvls, Protocol.simple] = topology.nvls_latency_us
            bandwidth_gbs[Algorithm.nvls, Protocol.simple] = topology.nvls_gbs
        for cell in topology.stated_cells:
            if cell.collective == collective.name:
                place = Algorithm[cell.algorithm], Protocol[cell.protocol]
                latency_us[place], bandwidth_gbs[place] = cell.latency_us, cell.gbs
    for array in (latency_us, bandwidth_gbs):
        array.flags.writeable = False
    return CellTerms(latency_us, bandwidth_gbs)


_GATHER_OR_SCATTER = (Collective.all_gather, Collective.reduce_scatter)
_NVLS_COLLECTIVES = (*_GATHER_OR_SCATTER, Collective.all_reduce)
_RING_COLLECTIVES = (*_NVLS_COLLECTIVES, Collective.broadcast, Collective.reduce)


def _generation(topology: Topology) -> int:
    """Row of the tables by compute capability: Volta, Ampere, Hopper, Blackwell."""
    return sum(topology.compute_capability >= floor for floor in (80, 90, 100))


def _scale(topology: Topology) -> int:
    return min(topology.n_nodes, 3) - 1


def _ll128_is_on(topology: Topology) -> bool:
    type_inter_limit = PATH_PXN if topology.compute_capability >= 90 else PATH_PXB
    return (
        topology.compute_capability >= 70
        and topology.type_intra <= PATH_NVB
        and topology.type_inter <= type_inter_limit
    )


def _search_gbs(topology: Topology, n_channels: int, intra_gbs: float, inter_gbs: float) -> float:
    return n_channels * (intra_gbs if topology.n_nodes <= 2 else inter_gbs)


def _ll_max_gbs(topology: Topology) -> float:
    row = _generation(topology) if topology.n_nodes == 1 else int(topology.cpu_is_amd)
    return _LL_MAX_GBS[row][_scale(topology)]


def _n_steps(topology: Topology, collective: Collective) -> int:
    if collective is Collective.all_reduce:
        return 2 * (topology.n_ranks - 1)
    if collective in _GATHER_OR_SCATTER:
        return topology.n_ranks - 1
    return topology.n_ranks


def _ring_gbs(topology: Topology, collective: Collective, protocol: Protocol) -> float:
    gbs = _search_gbs(topology, topology.ring_channels, topology.ring_bw_intra_gbs, topology.ring_bw_inter_gbs)
    if protocol is Protocol.ll:
        gbs = min(_ll_max_gbs(topology), 0.5 * gbs)
    elif protocol is Protocol.ll128:
        per_channel_gbs = _RING_LL128_GBS[_generation(topology)][_scale(topology)]
        gbs = min(0.92 * gbs, topology.ring_channels * per_channel_gbs)
    return gbs * topology.n_ranks / _n_steps(topology, collective)


def _tree_gbs(topology: Topology, protocol: Protocol) -> float:
    generation, scale = _generation(topology), _scale(topology)
    gbs = min(
        0.92 * _search_gbs(topology, topology.tree_channels, topology.tree_bw_intra_gbs, topology.tree_bw_inter_gbs),
        topology.tree_channels * _TREE_GBS[generation][scale],
    )
    if protocol is Protocol.ll:
        gbs = min(gbs / 3.8, _ll_max_gbs(topology))
    elif protocol is Protocol.ll128:
        gbs = min(
            gbs * (7.0 / 9.0 if topology.n_nodes == 1 else 120.0 / 128.0),
            topology.tree_channels * _TREE_LL128_GBS[generation][scale],
        )
    if topology.plain_tree_pattern:
        gbs *= 0.85
    return gbs * 0.5


def _intra_us(topology: Topology, algorithm: Algorithm, protocol: Protocol) -> float:
    table = _NVLINK_US if topology.type_intra == PATH_NVL else _PCI_US
    return table[algorithm][protocol]


def _inter_us(topology: Topology, algorithm: Algorithm, protocol: Protocol) -> float:
    if topology.n_ranks == topology.n_nodes:
        algorithm = Algorithm.tree
    n_latencies = 2 if protocol is Protocol.simple else 1
    return _NET_US[algorithm][protocol] + topology.latency_inter_us * n_latencies


def _ring_latency_us(topology: Topology, collective: Collective, protocol: Protocol) -> float:
    base_us = _BASE_US[Algorithm.ring][protocol]
    intra_us = _intra_us(topology, Algorithm.ring, protocol)
    n_steps = _n_steps(topology, collective)
    if collective in (Collective.broadcast, Collective.reduce):
        hop_us = intra_us if topology.n_nodes == 1 else _NET_US[Algorithm.ring][protocol]
        if topology.same_channels:  # one pipeline along the ring: NCCL counts only the hop to the first peer
            return base_us + hop_us
        if protocol is Protocol.simple:
            one_node = topology.n_nodes == 1
            hop_us = (_NVLINK_US if one_node else _NET_US)[Algorithm.tree][protocol]
        return base_us + n_steps * hop_us
    n_inter_steps = (topology.n_nodes - 1) * (2 if collective is Collective.all_reduce else 1)
    if topology.n_nodes > 1:
        overhead_us = 2.0 if topology.cpu_is_amd else 1.0
        intra_us = max(intra_us, overhead_us * (3 if protocol is Protocol.simple else 1))
    inter_us = _inter_us(topology, Algorithm.ring, protocol)
    return base_us + (n_steps - n_inter_steps) * intra_us + n_inter_steps * inter_us


def _tree_latency_us(topology: Topology, protocol: Protocol) -> float:
    intra_us = _intra_us(topology, Algorithm.tree, protocol)
    inter_us = _inter_us(topology, Algorithm.tree, protocol)
    n_hops = topology.n_ranks // topology.n_nodes - 1
    n_levels = topology.n_nodes.bit_length() - 1
    return _BASE_US[Algorithm.tree][protocol] + 2 * (n_hops * intra_us + n_levels * inter_us)


def _pat_latency_us(topology: Topology) -> float:
    # PAT runs with one rank per node only; NCCL uses the tree's network term there.
    inter_us = _inter_us(topology, Algorithm.pat, Protocol.simple)
    n_levels = topology.n_nodes.bit_length() - 1
    return _BASE_US[Algorithm.pat][Protocol.simple] + n_levels * inter_us / 3.5 + 2.8 * topology.n_ranks
