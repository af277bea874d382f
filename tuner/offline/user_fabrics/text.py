"""Writes a fabric file in which NCCL's belief is the truth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from msgspec.structs import replace

from ....agent.nccl import cost_model, memory
from ....agent.nccl.cell_terms import StatedCell, Topology
from ....agent.nccl.fabric_file import BelievedSpan
from ....agent.nccl.mock_cuda.machine import Gpu
from ....store.records import Algorithm, Collective, CommunicatorClass, Protocol


class _Figures(NamedTuple):
    """Datasheet figures of the datacenter GPU with a compute capability."""

    tflops: float
    """Dense TFLOP/s in 16 bits."""
    memory_gbs: float
    memory_mb: float


_DATASHEETS: Final = {
    50: _Figures(15, 700, 16e3), 70: _Figures(125, 900, 32e3), 75: _Figures(65, 320, 16e3),
    80: _Figures(312, 2039, 80e3), 86: _Figures(150, 696, 48e3), 89: _Figures(362, 864, 48e3),
    90: _Figures(990, 3350, 80e3), 100: _Figures(2250, 8000, 180e3), 120: _Figures(210, 1792, 32e3),
}  # fmt: skip
"""Figures by least compute capability: P100, V100, T4, A100, A40, L40S, H100, B200, RTX 5090."""


def fabric_text(name: str, release: str, gpu: Gpu, one_node: Topology | None, many_nodes: Topology | None) -> str:
    """The file's content; without `one_node`, a node has one rank, and without `many_nodes`, there is one node.

    The topology file lies beside it under the same name.
    """
    inside, largest = one_node or many_nodes, many_nodes or one_node
    assert inside is not None
    assert largest is not None
    n_nodes, ranks_per_node = largest.n_nodes, largest.n_ranks // largest.n_nodes
    hop = replace(largest, n_ranks=2, n_nodes=min(2, n_nodes), same_channels=True)
    hop_us = float(cost_model.cost_us(hop, Collective.broadcast, Algorithm.ring, Protocol.simple, 0))
    place = CommunicatorClass(largest.n_ranks, n_nodes)
    figures = _DATASHEETS[max(each for each in _DATASHEETS if each <= gpu.capability)]
    inter = f"inter_gbs = {many_nodes.ring_channels * many_nodes.ring_bw_inter_gbs:.6g}\n" if many_nodes else ""
    spans = "".join(
        line for key, span in (("one_node", one_node), ("many_nodes", many_nodes)) if span for line in _span(key, span)
    )
    return f'''\
# Made by `zerotune hardware add`. Edit what you know better: `zerotune hardware` says what it cannot use.
title = "{n_nodes} x {ranks_per_node} GPUs of {name}.xml, as NCCL {release} believes"
source = """Belief: what NCCL {release} found in the topology file, and its own cost tables, for all ranks of a node \\
or of all nodes; fewer ranks have the same terms. Truth is that belief: times are NCCL's own estimates, nothing is \\
measured, and NCCL's choice is the best one. Compute, memory and noise are assumed."""
ranks_per_node = {ranks_per_node}
max_nodes = {n_nodes}
machine = "{name}.xml"

[belief]
compute_capability = {gpu.capability}
type_intra = {inside.type_intra}
cpu_is_amd = {str(inside.cpu_is_amd).lower()}
nccl_version = [{inside.nccl_version[0]}, {inside.nccl_version[1]}]
{spans}
# With measurements: follows_belief = false and [[truth.cells]], or recorded = "points.csv" (docs/reference/formats.md).
[truth]
follows_belief = true
intra_gbs = {inside.ring_channels * inside.ring_bw_intra_gbs:.6g}
{inter}point_to_point_us = {hop_us:.6g} # a hop of NCCL's ring, which has no estimate for messages from one to another

[compute]
tflops = {figures.tflops:.6g}
efficiency = 0.5
launch_us = 4.0
memory_gbs = {figures.memory_gbs:.6g}

[contention]
n_sms = {gpu.n_multiprocessors}
sms_per_channel = 0.0
sharing = 1.0

[memory]
device_mb = {figures.memory_mb:.6g}
channel_mb = {memory.connection_mb(Algorithm.ring, place, 1):.6g}
algorithm_mb = 0.0

[noise]
sigma = 0.03
arrival_skew_us = 2.0
'''


def _span(key: str, topology: Topology) -> Iterator[str]:
    yield f"[belief.{key}]\n"
    defaults = BelievedSpan.__struct_defaults__
    optional = dict(zip(BelievedSpan.__struct_fields__[-len(defaults) :], defaults, strict=True))
    for name in BelievedSpan.__struct_fields__:
        value = getattr(topology, name)
        if name == "stated_cells":
            yield from (f"[[belief.{key}.stated_cells]]\n{_fields(cell)}" for cell in value)
        elif name not in optional or value != optional[name]:
            yield f"{name} = {_toml(value)}\n"


def _fields(cell: StatedCell) -> str:
    return "".join(f"{name} = {_toml(getattr(cell, name))}\n" for name in cell.__struct_fields__)


def _toml(value: object) -> str:
    """A value as TOML; strings here are names of NCCL."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.7g}"
    return f'"{value}"' if isinstance(value, str) else str(value)
