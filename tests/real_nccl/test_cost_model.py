"""Our cost model against the cost tables of NCCL's own library, cell by cell."""

from __future__ import annotations

import os

import pytest

from zerotune.agent.nccl import cost_model
from zerotune.agent.nccl.mock_cuda.machine import read_machine
from zerotune.agent.nccl.twin.protocol import Question
from zerotune.agent.nccl.twin.search import believed
from zerotune.agent.nccl.twin.twin import Cluster, ask_nccl, topology_file
from zerotune.store.records import Algorithm, Collective, Protocol

QUICK = (("dgx_h100", 2, 2), ("dgx_a100", 2, 1), ("ethernet_box", 4, 1))
MORE = (("dgx_h100", 1, 2), ("pcie_l40s", 1, 4), ("pcie_l40s", 2, 2))
CLUSTERS = (*QUICK, *MORE) if "ZEROTUNE_NCCL_RELEASES" in os.environ else QUICK
COLLECTIVES = (
    Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce, Collective.broadcast, Collective.reduce,
)  # fmt: skip
SIZES = tuple(1 << exponent for exponent in range(10, 31, 2))
WORST = 1e-3
FROM_THE_FABRIC = (Algorithm.nvls, Algorithm.nvls_tree)
"""Their terms are not computed: a fabric file states them."""


def named_cells(cluster):
    """What is not compared: FROM_THE_FABRIC, and PAT over several ranks of a node, which 2.32 offers at any price."""
    named = FROM_THE_FABRIC if cluster.ranks_per_node == 1 else (*FROM_THE_FABRIC, Algorithm.pat)
    return {(algorithm, protocol) for algorithm in named for protocol in Protocol}


@pytest.mark.parametrize("where", CLUSTERS, ids=lambda where: f"{where[1]}x{where[2]}-{where[0]}")
def test_every_cell_costs_what_nccl_says(release, where) -> None:
    version, library = release
    if version < (2, 23):
        pytest.skip("NCCL 2.22 has older tables, and 2.21 shows none")
    name, n_nodes, ranks_per_node = where
    with topology_file(name) as topology:
        cluster = Cluster(topology, n_nodes, ranks_per_node)
        questions = [Question(collective, size) for collective in COLLECTIVES for size in SIZES]
        answer = ask_nccl(library, cluster, questions, search=True)
        model = believed(answer.search, read_machine(topology), cluster.n_ranks, n_nodes, version)
    wrong = []
    for each in answer.answers:
        question = each.question
        table = cost_model.cost_table(model, question.collective, question.message_bytes)
        live = {(cell.algorithm, cell.protocol): cell.cost_us for cell in each.cells}
        ours = {(a, p): float(table[a, p]) for a in Algorithm for p in Protocol if table[a, p] >= 0}
        for cell in (live.keys() | ours.keys()) - named_cells(cluster):
            if live.get(cell, -1) != pytest.approx(ours.get(cell, -1), rel=WORST):
                wrong.append((question.collective.name, question.message_bytes, *cell, live.get(cell), ours.get(cell)))
    assert not wrong
