"""Durations of collectives on a cluster, by NCCL's own cost model or by a fabric file."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Protocol

import msgspec

from ....agent.nccl import cost_model
from ....agent.nccl.cell_terms import PATH_NVL, Topology
from ....agent.nccl.fabric_model import Fabric
from ....agent.nccl.mock_cuda.machine import Machine
from ....store.records import Collective, CommunicatorClass

NVLINK_GBS: Final = {60: 18.0, 70: 20.0, 80: 20.0, 86: 12.0, 90: 20.6, 100: 40.1}
"""Bandwidth of one link and direction in NCCL's topology search, by compute capability (graph/topo.h)."""
PCIE_GBS: Final = 12.0
"""Bandwidth there of a sixteen-lane slot of the third generation through a CPU (PCI_BW, LOC_BW)."""
SKEW_US: Final = 5.0
"""Assumed skew of machines without measurements; it hardly affects large blocks."""
_CHANNELS: Final = 16
_PATH_NET: Final = 5
"""PXB: adapters beside the GPUs."""


class Network(Protocol):
    """A cluster's network, which gives durations of collectives."""

    ranks_per_node: int
    known_nodes: int
    """Nodes up to which it was described or measured; times beyond are extrapolated."""
    skew_us: float
    """Time from a rank's issue of a collective to its beginning, as the last rank comes later."""

    def time_us(self, collective: Collective, message_bytes: float, place: CommunicatorClass) -> float:
        """Microseconds of one collective alone, of NCCL's total `message_bytes`; 0 for one rank."""
        ...


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """Links of GPUs and nodes; GB/s, one way."""

    capability: int
    ranks_per_node: int
    gpu_gbs: float
    """Bandwidth of one GPU within its node."""
    node_gbs: float
    """Bandwidth of all adapters of a node; 0: it has none."""
    known_nodes: int = 280
    """Nodes of the largest published run in the fit of constants."""
    has_nvlink: bool = True
    nccl_version: tuple[int, int] = (2, 28)


def links_of(machine: Machine) -> Links:
    """The links of a node that a topology file describes."""
    gpu = machine.gpus[0]
    n_nvlinks = min(each.n_nvlinks for each in machine.gpus)  # a ring is as fast as its slowest part
    linked = NVLINK_GBS[max((known for known in NVLINK_GBS if known <= gpu.capability), default=60)] * n_nvlinks
    return Links(
        capability=gpu.capability,
        ranks_per_node=len(machine.gpus),
        gpu_gbs=linked or PCIE_GBS,
        node_gbs=sum(nic.speed_mbps for nic in machine.nics) / 8000.0,
        has_nvlink=linked > 0,
    )


class LinkNetwork:
    """NCCL's cost model of rings over the links' bandwidth, of which training gets `share`."""

    def __init__(self, links: Links, share: float) -> None:
        self.links, self.share = links, share
        self.ranks_per_node, self.known_nodes = links.ranks_per_node, links.known_nodes
        self.skew_us = SKEW_US
        self.time_us = lru_cache(maxsize=1 << 16)(self._time_us)

    def _time_us(self, collective: Collective, message_bytes: float, place: CommunicatorClass) -> float:
        if place.n_ranks < 2 or message_bytes <= 0:
            return 0.0
        table = cost_model.cost_table(_topology(self.links, place), collective, max(1, round(message_bytes)))
        best_us = float(table[table >= 0].min())
        # The model's bandwidths are the wires'; its latencies are measured ones.
        return best_us + _wire_us(self.links, collective, message_bytes, place) * (1 / self.share - 1)


def _wire_us(links: Links, collective: Collective, message_bytes: float, place: CommunicatorClass) -> float:
    passes = 2.0 if collective is Collective.all_reduce else 1.0
    moved = passes * message_bytes * (place.n_ranks - 1) / place.n_ranks
    return moved / (1000.0 * _ring_gbs(links, place))


def _ring_gbs(links: Links, place: CommunicatorClass) -> float:
    """Bandwidth of one rank's ring: its links within a node, the reachable adapters across nodes."""
    if place.n_nodes == 1:
        return links.gpu_gbs
    ranks_here = place.n_ranks / place.n_nodes
    return min(links.gpu_gbs, links.node_gbs * min(1.0, ranks_here / links.ranks_per_node))


@lru_cache(maxsize=4096)
def _topology(links: Links, place: CommunicatorClass) -> Topology:
    one_channel = _ring_gbs(links, place) / _CHANNELS
    return Topology(
        n_ranks=place.n_ranks,
        n_nodes=place.n_nodes,
        compute_capability=links.capability,
        ring_channels=_CHANNELS,
        ring_bw_intra_gbs=one_channel,
        ring_bw_inter_gbs=one_channel,
        latency_inter_us=0.0,
        type_intra=PATH_NVL if links.has_nvlink else _PATH_NET + 3,
        type_inter=_PATH_NET if place.n_nodes > 1 else 0,
        tree_channels=_CHANNELS,
        tree_bw_intra_gbs=one_channel,
        tree_bw_inter_gbs=one_channel,
        comm_channels=_CHANNELS,
        nccl_version=links.nccl_version,
    )


class FabricNetwork:
    """Real durations of NCCL's own choice in a fabric file, on any number of nodes."""

    def __init__(self, machine: Fabric, n_nodes: int) -> None:
        self.fabric = machine if n_nodes <= machine.max_nodes else machine.with_nodes(n_nodes)
        self.ranks_per_node, self.known_nodes = machine.ranks_per_node, machine.max_nodes
        self.skew_us = machine.noise.arrival_skew_us
        self.time_us = lru_cache(maxsize=1 << 16)(self._time_us)

    def _time_us(self, collective: Collective, message_bytes: float, place: CommunicatorClass) -> float:
        if place.n_ranks < 2 or message_bytes <= 0:
            return 0.0
        size = max(1, round(message_bytes))
        topology = self.fabric.topology(place)
        chosen = cost_model.default_choice(topology, collective, size)
        return self.fabric.truth_us(
            place, collective, chosen.algorithm, chosen.protocol, max(1, chosen.n_channels), size
        )
