"""Plans that ask NCCL for each setting in turn, and the settings that NCCL's own library ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from zerotune.agent.nccl import catalog
from zerotune.agent.nccl.twin.protocol import Answer, Question
from zerotune.agent.nccl.twin.twin import Cluster
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Phase, PlanRow, Protocol

COLLECTIVES = (Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce)
SIZES = (1 << 16, 1 << 20, 1 << 25)
"""Bytes: little traffic for channels, some, and enough for all that are asked for."""
CHANNELS = (0, 2, 16)
"""0: NCCL's own count."""
STEP_BYTES = 1024
"""Between the message sizes of two settings, so that each has a row and a size of its own."""
ON_EVERY_MACHINE = {
    (algorithm, protocol)
    for algorithm in (Algorithm.ring, Algorithm.tree)
    for protocol in (Protocol.ll, Protocol.simple)
}
"""The cells that 2.21, which shows no table, must have."""
CLUSTERS = {"one node": ("dgx_h100", 1, 2), "two nodes": ("dgx_h100", 2, 1), "pcie": ("pcie_l40s", 1, 2)}


def forced(version: tuple[int, ...], cluster: Cluster) -> tuple[list[PlanRow], list[Question]]:
    """A row per setting, and the question that it answers."""
    shape = CommunicatorClass(cluster.n_ranks, cluster.n_nodes)
    rows: list[PlanRow] = []
    for collective in COLLECTIVES:
        cells = catalog.legal_cells(
            collective, n_nodes=cluster.n_nodes, n_ranks=cluster.n_ranks, nccl_version=version, nvls=True
        )
        settings = [(cell, n_channels, size) for size in SIZES for cell in cells for n_channels in CHANNELS]
        for (algorithm, protocol), n_channels, size in settings:
            message_bytes = size + STEP_BYTES * len(rows)
            candidate = Candidate(algorithm, protocol, n_channels)
            rows.append(PlanRow(shape, collective, Phase.other, message_bytes, message_bytes, candidate))
    return rows, [Question(row.collective, row.min_bytes) for row in rows]


def offered(version: tuple[int, ...], answers: Sequence[Answer]) -> dict[Collective, set[catalog.Cell]]:
    """Cells that NCCL has here, by collective, from its tables; 2.21 shows none, and gets ON_EVERY_MACHINE."""
    cells: dict[Collective, set[catalog.Cell]] = defaultdict(set)
    for answer in answers:
        cells[answer.question.collective] |= {(cell.algorithm, cell.protocol) for cell in answer.cells}
        if version < (2, 22):
            cells[answer.question.collective] |= ON_EVERY_MACHINE
    return cells
