"""Checks which settings NCCL accepts for a job's calls, and which communicators fit on a fabric.

For a reduce-scatter that averages floats, as FSDP2's does, NCCL refuses PAT and NVLS and runs its own choice instead.
A trace does not name operators, but if such an algorithm ran in it, the job sums. Otherwise the job is assumed to
average, and settings that NCCL may refuse are not judged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from ....agent.nccl import catalog, cost_model
from ....agent.nccl.fabric_model import Fabric
from ....store.errors import FabricError
from ....store.records import Candidate, Collective, CommunicatorClass
from ....store.sqlite.rows.runnable import can_run
from ...modeling.cost_prior import CostPrior
from .table import CollectiveTable, Shape

_SCATTER: Final = Collective.reduce_scatter
SUMS_ONLY: Final = frozenset(
    algorithm
    for algorithm, _ in {*catalog.legal_cells(_SCATTER, n_nodes=2, collnet=True)}
    - {*catalog.legal_cells(_SCATTER, n_nodes=2, collnet=True, redop_is_sum=False)}
)
"""Algorithms that a reduce-scatter with averages cannot use."""


def is_known_to_sum(table: CollectiveTable) -> bool:
    """Whether a timed reduce-scatter of the trace ran an algorithm that averages cannot use."""
    ran = (table.rows["collective"] == _SCATTER) & np.isfinite(table.duration_us)
    return bool(np.isin(table.rows["algorithm"][ran], [int(algorithm) for algorithm in SUMS_ONLY]).any())


def may_run(shape: Shape, candidate: Candidate, sums: bool) -> bool:
    """Whether NCCL is sure to accept a setting; `sums`: the job's reduce-scatters are known not to average."""
    if not can_run(shape.collective, candidate.algorithm, candidate.protocol, shape.n_nodes):
        return False
    return sums or shape.collective is not _SCATTER or candidate.algorithm not in SUMS_ONLY


def fits(fabric: Fabric | None, communicator: CommunicatorClass) -> bool:
    """Whether the communicator's ranks are known and fit on the fabric, if the fabric is known."""
    if fabric is None:
        return communicator.n_ranks > 0
    try:
        return fabric.topology(communicator) is not None
    except (FabricError, ValueError):
        return False


def without_refused(costs: CostPrior, fabric: Fabric, shapes: Iterable[Shape]) -> None:
    """Mark, in `costs`, the algorithms that NCCL refuses for averages, as a running job's cost tables do."""
    for shape in shapes:
        if shape.collective is not _SCATTER:
            continue
        try:
            table = cost_model.cost_table(fabric.topology(shape.communicator), _SCATTER, shape.message_bytes).copy()
        except (FabricError, ValueError):
            continue  # does not fit on the fabric, so nothing is predicted
        table[[int(algorithm) for algorithm in SUMS_ONLY]] = cost_model.IGNORE
        costs.learn_live(shape.communicator, _SCATTER, shape.message_bytes, table)
