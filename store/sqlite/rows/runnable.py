"""The algorithms and protocols that any release of NCCL can run for a collective, on any hardware.

NCCL's catalog (`agent/nccl`) has the settings of one job, which are a subset. This module checks imported rows: an
all-gather by tree is a mistake in the file, however fast it claims to be.

Rows are arrays of MEASUREMENT or OBSERVATION, shape (n,). Answers have the same shape. `n_nodes` 0 means unknown.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...records import Algorithm, Collective, Protocol
from .measurements import UNKNOWN

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
"""NCCL has no choice for other collectives."""
_OF_SEVERAL_NODES: Final = Algorithm.nvls_tree


def runnable_cells(collective: Collective, n_nodes: int) -> tuple[tuple[Algorithm, Protocol], ...]:
    """Every (algorithm, protocol) that some release can run."""
    cells = _CELLS.get(collective, ())
    return tuple(cell for cell in cells if cell[0] is not _OF_SEVERAL_NODES or n_nodes != 1)


def can_run(collective: Collective, algorithm: Algorithm | None, protocol: Protocol | None, n_nodes: int) -> bool:
    """Whether any release of NCCL can run this setting; unknown parts (None) count as possible."""
    return algorithm is None or any(
        algorithm is cell[0] and protocol in (None, cell[1]) for cell in runnable_cells(collective, n_nodes)
    )


def only_protocol(collective: Collective, algorithm: Algorithm) -> Protocol | None:
    """The only protocol that NCCL has for an algorithm of this collective; None: it has several, or none."""
    found = [protocol for one, protocol in _CELLS.get(collective, ()) if one is algorithm]
    return found[0] if len(found) == 1 else None


def with_only_protocols(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Write the protocol in place into rows that name only an algorithm, if it has only one protocol.

    Returns whether each row still names only an algorithm.
    """
    lack: NDArray[np.bool_] = (rows["protocol"] == UNKNOWN) & (rows["algorithm"] != UNKNOWN)
    if lack.any():
        code = np.minimum(rows["algorithm"][lack], _NO_ALGORITHM)
        rows["protocol"][lack] = _only_protocols()[np.minimum(rows["collective"][lack], _NO_COLLECTIVE), code]
        lack &= rows["protocol"] == UNKNOWN
    return lack


def runnable(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each row names nothing, or a setting that NCCL can run."""
    code = np.minimum(rows["algorithm"], _NO_ALGORITHM) << 2 | np.minimum(rows["protocol"], _NO_PROTOCOL)
    found: NDArray[np.bool_] = _table()[np.minimum(rows["collective"], _NO_COLLECTIVE), code]
    needs_nodes = rows["algorithm"] == _OF_SEVERAL_NODES
    if needs_nodes.any():
        found &= ~needs_nodes | (rows["n_nodes"] != 1)
    return found


_NO_COLLECTIVE: Final = np.uint8(15)
_NO_ALGORITHM: Final = np.uint8(7)
_NO_PROTOCOL: Final = np.uint8(3)
"""A number above all known ones, as UNKNOWN is."""


@cache
def _table() -> NDArray[np.bool_]:
    """Whether NCCL can run it, by collective, and by algorithm and protocol in one number."""
    table = np.zeros((16, 8, 4), np.bool_)
    for collective, cells in _CELLS.items():
        for algorithm, protocol in cells:
            table[collective, algorithm, protocol] = table[collective, algorithm, _NO_PROTOCOL] = True
    table[:, _NO_ALGORITHM] = True
    return table.reshape(16, 32)


@cache
def _only_protocols() -> NDArray[np.uint8]:
    """The only protocol by collective and algorithm, or UNKNOWN."""
    table = np.full((16, 8), UNKNOWN, np.uint8)
    for collective in _CELLS:
        for algorithm in Algorithm:
            protocol = only_protocol(collective, algorithm)
            table[collective, algorithm] = UNKNOWN if protocol is None else protocol
    return table


_CODES: Final = [
    (collective * 256 + algorithm) * 256 + protocol
    for collective, cells in _CELLS.items()
    for algorithm, protocol in (*cells, *((one, UNKNOWN) for one in dict(cells)))
]
RUNNABLE_SQL: Final = (
    f"(algorithm = {UNKNOWN} OR (collective * 256 + algorithm) * 256 + protocol IN ({','.join(map(str, _CODES))})"
    f" AND (algorithm <> {int(_OF_SEVERAL_NODES)} OR n_nodes <> 1))"
)
"""SQL condition under which NCCL can run the setting of a series."""
