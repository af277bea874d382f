"""The result of NCCL's topology search, read from NCCL's own log, as an input of the cost model."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from ....store.errors import PluginError
from ..cell_terms import Topology
from ..mock_cuda.machine import Machine

LOG: Final = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH"}
"""Settings with which NCCL logs its search."""
_GRAPH: Final = re.compile(
    r"Pattern (\d), crossNic \d+, nChannels (\d+), bw ([\d.]+)/([\d.]+), type (\w+)/(\w+), sameChannels (\d)"
)
_CHANNELS: Final = re.compile(r"(\d+) coll channels, \d+ collnet channels, (\d+) nvls channels")
_TREES: Final = (1, 2, 3)
"""NCCL_TOPO_PATTERN_BALANCED_TREE, _SPLIT_TREE, _TREE"""
_PLAIN_TREE: Final = 3
_RING: Final = 4
"""NCCL_TOPO_PATTERN_RING"""
_PATHS: Final = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
"""Path types, nearest first, by NCCL's numbers from 2.28 on."""


class Graph(msgspec.Struct, frozen=True):
    """Rings or trees of the search."""

    pattern: int
    n_channels: int
    intra_gbs: float
    """Rate of one channel within a node."""
    inter_gbs: float
    """Rate of one channel between nodes."""
    type_intra: str
    type_inter: str
    same_channels: bool
    """Whether all channels take the same path."""


class Search(msgspec.Struct, frozen=True):
    """The result of the search."""

    ring: Graph
    tree: Graph
    n_channels: int
    """The communicator's final number of channels."""
    n_nvls_channels: int


def read_search(log: str) -> Search:
    """Read NCCL's log of one node's ranks; PluginError if it has no rings, trees or channels."""
    graphs: dict[int, Graph] = {}
    for found in _GRAPH.finditer(log):
        pattern, n_channels, intra, inter, type_intra, type_inter, same = found.groups()
        graph = Graph(
            int(pattern), int(n_channels), float(intra), float(inter), type_intra, type_inter, same_channels=same == "1"
        )
        graphs.setdefault(graph.pattern, graph)
    channels = _CHANNELS.search(log)
    tree = next((graphs[pattern] for pattern in _TREES if pattern in graphs), None)
    if _RING not in graphs or tree is None or channels is None:
        raise PluginError("NCCL's log does not tell what its topology search found")
    return Search(graphs[_RING], tree, int(channels[1]), int(channels[2]))


def believed(search: Search, machine: Machine, n_ranks: int, n_nodes: int, nccl_version: tuple[int, ...]) -> Topology:
    """The search as the cost model's input, without terms of NVLS."""
    ring, tree = search.ring, search.tree
    return Topology(
        n_ranks=n_ranks,
        n_nodes=n_nodes,
        compute_capability=machine.gpus[0].capability,
        ring_channels=ring.n_channels,
        ring_bw_intra_gbs=ring.intra_gbs,
        ring_bw_inter_gbs=ring.inter_gbs,
        latency_inter_us=max((nic.latency_us for nic in machine.nics), default=0.0) if n_nodes > 1 else 0.0,
        type_intra=_PATHS.index(ring.type_intra),
        type_inter=_PATHS.index(ring.type_inter) if n_nodes > 1 else 0,
        tree_channels=tree.n_channels,
        tree_bw_intra_gbs=tree.intra_gbs,
        tree_bw_inter_gbs=tree.inter_gbs,
        comm_channels=search.n_channels,
        cpu_is_amd=machine.cpu_is_amd,
        plain_tree_pattern=tree.pattern == _PLAIN_TREE,
        same_channels=ring.same_channels,
        nvls_channels=search.n_nvls_channels,
        nccl_version=(nccl_version[0], nccl_version[1]),
    )
