"""Device memory that NCCL's own library takes to connect algorithms, beside what we predict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.lib.nccl.forced_cells import forced
from zerotune.agent.nccl import memory
from zerotune.agent.nccl.twin.protocol import Answer, Question
from zerotune.agent.nccl.twin.twin import Cluster, ask_nccl, topology_file
from zerotune.store.records import Algorithm, Collective, CommunicatorClass

CLUSTERS = (("dgx_h100", 1, 8), ("dgx_h100", 2, 1), ("dgx_h100", 2, 8), ("dgx_h100", 4, 1), ("pcie_l40s", 1, 2))
"""Machine, nodes, ranks per node: each kind of neighbour."""


class Taken(NamedTuple):
    """Memory of one algorithm on a cluster, on one rank."""

    algorithm: Algorithm
    measured_mb: float
    predicted_mb: float


def taken(library: Path, machine: str, n_nodes: int, ranks_per_node: int) -> Iterator[Taken]:
    """Use each algorithm that NCCL offers once, in turn, and see what its first use takes."""
    with topology_file(machine) as topology:
        cluster = Cluster(topology, n_nodes, ranks_per_node)
        version = ask_nccl(library, cluster, [Question(Collective.all_gather, 1 << 20)]).version
        rows, questions = forced(version, cluster)
        own_count = [place for place, row in enumerate(rows) if not row.candidate.n_channels]
        rows, questions = [rows[place] for place in own_count], [questions[place] for place in own_count]
        answers = ask_nccl(library, cluster, questions, rows, timeout_s=300).answers
    by_algorithm: dict[Algorithm, list[Answer]] = defaultdict(list)
    for answer in answers:
        if answer.algorithm is not None:
            by_algorithm[answer.algorithm].append(answer)
    shape = CommunicatorClass(cluster.n_ranks, n_nodes)
    for algorithm, own in by_algorithm.items():
        n_channels = max(answer.n_channels for answer in own)
        measured_mb = sum(answer.taken_bytes for answer in own) / 1e6
        yield Taken(algorithm, measured_mb, memory.connection_mb(algorithm, shape, n_channels))
