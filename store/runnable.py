"""Which algorithm and protocol NCCL can run at all for a collective, whatever its release, hardware and options.

`agent.nccl.catalog` says what a job may choose from, which is never more. This says what a row that somebody else
wrote can be true of: an all-gather by tree is a mistake in a file, however fast it is said to have been.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from store.measurements import UNKNOWN
from store.records import Algorithm, Collective, Protocol

_RING: Final = tuple((Algorithm.ring, protocol) for protocol in Protocol)
_BOTH_WAYS: Final = tuple((algorithm, Protocol.simple) for algorithm in (Algorithm.collnet_direct, Algorithm.nvls))
_GATHERS: Final = (*_RING, *_BOTH_WAYS, (Algorithm.pat, Protocol.simple))
_CELLS: Final = {
    Collective.all_reduce: (
        *((Algorithm.tree, protocol) for protocol in Protocol),
        *_RING,
        *_BOTH_WAYS,
        (Algorithm.collnet_chain, Protocol.simple),
        (Algorithm.nvls_tree, Protocol.simple),
    ),
    Collective.all_gather: _GATHERS,
    Collective.reduce_scatter: _GATHERS,
    Collective.broadcast: _RING,
    Collective.reduce: _RING,
}
"""Of what is not here, NCCL has nothing to choose."""
_OF_SEVERAL_NODES: Final = Algorithm.nvls_tree


def runnable_cells(collective: Collective, n_nodes: int) -> tuple[tuple[Algorithm, Protocol], ...]:
    """Every (algorithm, protocol); `n_nodes` 0 = unknown."""
    cells = _CELLS.get(collective, ())
    return tuple(cell for cell in cells if cell[0] is not _OF_SEVERAL_NODES or n_nodes != 1)


def can_run(collective: Collective, algorithm: Algorithm | None, protocol: Protocol | None, n_nodes: int) -> bool:
    """Whether NCCL can run it; None says nothing, and that can be."""
    return algorithm is None or protocol is None or (algorithm, protocol) in runnable_cells(collective, n_nodes)


def runnable(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows (MEASUREMENT or OBSERVATION, shape [n]) name what NCCL can run, or nothing, shape [n]."""
    algorithm, protocol = rows["algorithm"].astype(np.int32), rows["protocol"]
    code = (rows["collective"].astype(np.int32) * 256 + algorithm) * 256 + protocol
    has_nodes = (algorithm != _OF_SEVERAL_NODES) | (rows["n_nodes"] != 1)
    named: NDArray[np.bool_] = np.isin(code, _CODES) & has_nodes
    named |= (algorithm == UNKNOWN) | (protocol == UNKNOWN)
    return named


_CODES: Final = [
    (collective * 256 + algorithm) * 256 + protocol
    for collective, cells in _CELLS.items()
    for algorithm, protocol in cells
]
RUNNABLE_SQL: Final = (
    f"(algorithm = {UNKNOWN} OR (collective * 256 + algorithm) * 256 + protocol IN ({','.join(map(str, _CODES))})"
    f" AND (algorithm <> {int(_OF_SEVERAL_NODES)} OR n_nodes <> 1))"
)
"""The same of a series in the store."""
