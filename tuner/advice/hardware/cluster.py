"""Nodes, their GPUs and what joins them."""

from __future__ import annotations

from dataclasses import dataclass

from zerotune.store.errors import UserError
from zerotune.store.records import CommunicatorClass
from zerotune.tuner.advice.hardware.gpus import Gpu
from zerotune.tuner.advice.hardware.network import Network


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    name: str
    n_nodes: int
    gpu: Gpu
    network: Network
    gpus_per_node: int

    def __post_init__(self) -> None:
        if self.n_nodes < 1 or self.gpus_per_node < 1:
            raise UserError(f"{self.n_nodes} nodes of {self.gpus_per_node} GPUs are no cluster", "give one GPU or more")
        if self.gpus_per_node > self.network.ranks_per_node:
            raise UserError(
                f"{self.name} has {self.network.ranks_per_node} per node, not {self.gpus_per_node} GPUs",
                "ask for as many or fewer",
            )

    @property
    def n_gpus(self) -> int:
        """All of them."""
        return self.n_nodes * self.gpus_per_node

    @property
    def is_extrapolated(self) -> bool:
        """Whether it is larger than what its network's description covers."""
        return self.n_nodes > self.network.known_nodes

    def neighbours(self, n_ranks: int) -> CommunicatorClass:
        """The communicator of so many ranks side by side: a model-parallel group, or one of hybrid sharding."""
        return CommunicatorClass(n_ranks, -(-n_ranks // self.gpus_per_node))

    def every(self, stride: int, n_ranks: int) -> CommunicatorClass:
        """The communicator of so many ranks, `stride` apart: data-parallel ranks of a model-parallel group."""
        per_node = max(1, self.gpus_per_node // stride)
        return CommunicatorClass(n_ranks, min(n_ranks, -(-n_ranks // per_node)))
