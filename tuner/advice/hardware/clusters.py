"""Clusters by name: a shipped machine, a topology file, or a fabric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from ....agent.nccl import fabric
from ....agent.nccl.fabric_model import Fabric
from ....agent.nccl.mock_cuda.machine import connect, read_machine
from ....agent.nccl.twin.machines import MACHINES
from ....agent.nccl.twin.twin import topology_file
from ....store.errors import UserError
from ....store.records import CommunicatorClass
from ..constants import Constants
from .gpus import Gpu, gpu, usual
from .network import FabricNetwork, LinkNetwork, Network, links_of


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
        """GPUs of all nodes."""
        return self.n_nodes * self.gpus_per_node

    @property
    def is_extrapolated(self) -> bool:
        """Whether the cluster is larger than its network's description."""
        return self.n_nodes > self.network.known_nodes

    def neighbours(self, n_ranks: int) -> CommunicatorClass:
        """The communicator of `n_ranks` neighbouring ranks: a model-parallel group, or one of hybrid sharding."""
        return CommunicatorClass(n_ranks, -(-n_ranks // self.gpus_per_node))

    def every(self, stride: int, n_ranks: int) -> CommunicatorClass:
        """The communicator of `n_ranks` ranks, `stride` apart: data-parallel ranks of a model-parallel group."""
        per_node = max(1, self.gpus_per_node // stride)
        return CommunicatorClass(n_ranks, min(n_ranks, -(-n_ranks // per_node)))


MAX_NODES: Final = 8192
MAX_GB: Final = 1e6
_MAX_TFLOPS: Final = 1e6
_MB: Final = 1e6


def cluster(
    machine: str,
    n_nodes: int,
    constants: Constants,
    *,
    gpus_per_node: int | None = None,
    gpu_name: str | None = None,
    memory_gb: float | None = None,
    peak_tflops: float | None = None,
    nic_gbps: float | None = None,
) -> Cluster:
    """The cluster that a user describes.

    Args:
        machine: a name of MACHINES, a topology file, or a fabric's name or path.
        constants: give the share of the links' bandwidth that training gets.
        gpu_name: a name of GPUS; None: the machine's usual GPU, or the fabric's.
        memory_gb: in 10^9 bytes, instead of the table's.
        peak_tflops: of one GPU in 16 bits, instead of the table's.
        nic_gbps: in 10^9 bits per second, of each adapter without a speed in a topology file.

    Raises:
        UserError: there is no such machine or GPU, no network for several nodes, or an argument contradicts the
            machine.
    """
    if n_nodes < 1 or n_nodes > MAX_NODES:
        raise UserError(f"{n_nodes} nodes are no cluster", f"give 1 to {MAX_NODES}")
    if gpus_per_node is not None and gpus_per_node < 1:
        raise UserError(f"{gpus_per_node} GPUs train nothing", "give one GPU or more")
    for what, value, unit, most in (
        ("memory", memory_gb, "GB", MAX_GB),
        ("peak", peak_tflops, "TFLOP/s", _MAX_TFLOPS),
    ):
        if value is not None and not 0 < value <= most:
            raise UserError(f"a GPU's {what} of {value:g} {unit} is none", f"give more than 0 and at most {most:,.0f}")
    is_fabric = machine not in MACHINES and (
        machine.endswith(".toml") or machine in (*fabric.names(), *fabric.user_names())
    )
    if is_fabric:
        described = fabric.load(machine)
        if nic_gbps is not None:
            raise UserError(f"the fabric {machine} describes its network, --nic-gbps {nic_gbps:g}", "leave it out")
        network: FabricNetwork | LinkNetwork = FabricNetwork(described, n_nodes)
        found = gpu(gpu_name) if gpu_name else _fabrics_gpu(described)
        stated = described.belief.compute_capability
        if gpu_name and found.capability != stated:
            raise UserError(
                f"the fabric {machine} has GPUs of capability {stated}, --gpu {gpu_name}",
                "leave it out, or say --memory-gb and --peak-tflops",
            )
    else:
        named = gpu(gpu_name) if gpu_name else None
        with topology_file(machine, None if named is None else named.capability, nic_gbps) as path:
            node = read_machine(path)
        connect(node, machine, n_nodes)
        if n_nodes > 1 and any(nic.is_speed_assumed for nic in node.nics):
            raise UserError(f"{machine} does not state the speed of all of its adapters", "say --nic-gbps")
        network = LinkNetwork(links_of(node), constants.network_share)
        found = named or usual(node.gpus[0].capability)
    changes: dict[str, float] = {}
    if memory_gb is not None:
        changes["memory_bytes"] = round(memory_gb * 1e9)
    if peak_tflops is not None:
        changes |= {"peak_tflops": peak_tflops, "fp32_tflops": found.fp32_tflops * peak_tflops / found.peak_tflops}
    return Cluster(
        machine, n_nodes, msgspec.structs.replace(found, **changes), network, gpus_per_node or network.ranks_per_node
    )


def _fabrics_gpu(described: Fabric) -> Gpu:
    """The GPU of a fabric file; missing facts are those of the usual GPU."""
    known = usual(described.belief.compute_capability)
    return msgspec.structs.replace(
        known,
        name=described.name,
        memory_bytes=round(described.memory.device_mb * _MB),
        peak_tflops=described.compute.tflops,
        fp32_tflops=described.compute.tflops / 2,
        memory_gbs=described.compute.memory_gbs,
    )
