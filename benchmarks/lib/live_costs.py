"""Our cost model beside the cost tables of NCCL's own library, cell by cell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from zerotune.agent.nccl import cost_model
from zerotune.agent.nccl.mock_cuda.machine import read_machine
from zerotune.agent.nccl.twin.protocol import Question
from zerotune.agent.nccl.twin.search import believed
from zerotune.agent.nccl.twin.twin import Cluster, ask_nccl, topology_file
from zerotune.store.records import Algorithm, Collective, Protocol

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
MODELLED_SINCE = (2, 23)
"""2.22 has older tables, and 2.21 shows none."""
FROM_THE_FABRIC = (Algorithm.nvls, Algorithm.nvls_tree)
"""Their terms are not computed: a fabric file states them."""


class Difference(NamedTuple):
    """One cell at one size; a cost is None where the cell is not there."""

    collective: Collective
    message_bytes: int
    algorithm: Algorithm
    protocol: Protocol
    nccl_us: float | None
    model_us: float | None

    @property
    def relative_error(self) -> float:
        """Infinite where only one of the two has the cell."""
        if self.nccl_us is None or self.model_us is None:
            return float("inf")
        return abs(self.model_us / self.nccl_us - 1)


def differences(library: Path, machine: str, n_nodes: int, ranks_per_node: int) -> Iterator[Difference]:
    """Compare a cluster, without PAT over several ranks of a node, which 2.32 offers at any price.

    Args:
        library: a libnccl.so.2.
        machine: name of a machine, or a topology file.
        n_nodes: of the cluster.
        ranks_per_node: of the communicator.

    Yields:
        Every cell that NCCL or the model has, at each size.
    """
    with topology_file(machine) as topology:
        cluster = Cluster(topology, n_nodes, ranks_per_node)
        questions = [Question(collective, size) for collective in COLLECTIVES for size in SIZES]
        answer = ask_nccl(library, cluster, questions, search=True)
        assert answer.search is not None
        model = believed(answer.search, read_machine(topology), cluster.n_ranks, n_nodes, answer.version)
    left_out = FROM_THE_FABRIC if ranks_per_node == 1 else (*FROM_THE_FABRIC, Algorithm.pat)
    for each in answer.answers:
        question = each.question
        table = cost_model.cost_table(model, question.collective, question.message_bytes)
        nccl = {(cell.algorithm, cell.protocol): cell.cost_us for cell in each.cells}
        for algorithm in Algorithm:
            for protocol in Protocol:
                theirs, cost_us = nccl.get((algorithm, protocol)), float(table[algorithm, protocol])
                ours = cost_us if cost_us >= 0 else None
                if algorithm not in left_out and not theirs is ours is None:
                    yield Difference(question.collective, question.message_bytes, algorithm, protocol, theirs, ours)
