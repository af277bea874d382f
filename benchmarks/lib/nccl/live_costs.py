"""Our cost model beside the cost tables of NCCL's own library, cell by cell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import structs

from zerotune.agent.nccl.mock_cuda.machine import read_machine
from zerotune.agent.nccl.twin.live_table import NVLS, Difference, differences, with_stated_cells
from zerotune.agent.nccl.twin.protocol import Question
from zerotune.agent.nccl.twin.search import believed
from zerotune.agent.nccl.twin.twin import Cluster, ask_nccl, topology_file
from zerotune.store.records import Algorithm, Collective

CLUSTERS = (
    ("dgx_h100", 2, 2), ("dgx_a100", 2, 1), ("ethernet_box", 4, 1),
    ("dgx_h100", 1, 2), ("pcie_l40s", 1, 4), ("pcie_l40s", 2, 2),
)  # fmt: skip
"""Machine, nodes, ranks of each."""
COLLECTIVES = (
    Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce, Collective.broadcast, Collective.reduce,
)  # fmt: skip
SIZES = tuple(1 << exponent for exponent in range(10, 31, 2))
"""Bytes."""


def compare(library: Path, machine: str, n_nodes: int, ranks_per_node: int) -> Iterator[Difference]:
    with topology_file(machine) as topology:
        cluster = Cluster(topology, n_nodes, ranks_per_node)
        questions = [Question(collective, size) for collective in COLLECTIVES for size in SIZES]
        answer = ask_nccl(library, cluster, questions, search=True)
        assert answer.search is not None
        model = believed(answer.search, read_machine(topology), cluster.n_ranks, n_nodes, answer.version)
    # NVLS costs are read off a table, not computed: only sizes between its two sizes are compared.
    told = with_stated_cells(answer.answers, model).stated_cells
    nvls = tuple(cell for cell in told if Algorithm[cell.algorithm] in NVLS)
    yield from differences(answer.answers, structs.replace(model, stated_cells=nvls))
