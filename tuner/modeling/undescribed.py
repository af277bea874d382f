"""A cell's cost if NCCL's topology is not known: between its live tables, else along a generic line.

Costs are microseconds, shape (n,), for sizes in bytes, shape (n,).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ...store.records import Algorithm, Collective, CommunicatorClass, Protocol

Floats = npt.NDArray[np.float64]

# Generic hop latency in us and share of the link bandwidth by protocol (LL, LL128, Simple).
_GENERIC_HOP_US = (1.2, 2.2, 5.0)
_GENERIC_BASE_US = (6.6, 14.0, 8.4)
_GENERIC_SHARE = (0.4, 0.9, 1.0)
_GENERIC_INTRA_GBS = 100.0
GENERIC_INTER_GBS = 12.0


def interpolated_cost(tables: Mapping[int, npt.NDArray[np.float32]], cell: tuple[int, int], sizes: Floats) -> Floats:
    """Cost between the sizes that NCCL reported, log-log; beyond them proportional to the bytes. NaN: not available.

    A table has microseconds by algorithm and protocol, shape (7, 3); below zero: not available.
    """
    known = np.array(sorted(tables), dtype=np.float64)
    costs = np.array([float(tables[int(at)][cell]) for at in known])
    if np.any(costs < 0):
        return np.full(len(sizes), np.nan)
    logs = np.interp(np.log(sizes), np.log(known), np.log(np.maximum(costs, 1e-3)))
    beyond = np.maximum(sizes / known[-1], 1.0)
    result: Floats = np.exp(logs) * beyond
    return result


def generic_cost(
    communicator: CommunicatorClass,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    sizes: Floats,
) -> tuple[Floats, Floats]:
    """A latency-bandwidth line for hardware that nobody described: only its shape is reliable.

    Returns the part that does not depend on the bytes, and the whole.
    """
    n_ranks, n_nodes = communicator.n_ranks, communicator.n_nodes
    steps = max(1, n_ranks - 1) * (2 if collective is Collective.all_reduce else 1)
    hop_us = _GENERIC_HOP_US[protocol] * (3.0 if n_nodes > 1 else 1.0)
    if algorithm is Algorithm.ring:
        n_hops: float = steps
    else:
        n_hops = 2.0 * np.log2(max(2, n_ranks)) + 2.0
    link_gbs = (_GENERIC_INTRA_GBS if n_nodes == 1 else GENERIC_INTER_GBS) * _GENERIC_SHARE[protocol]
    if algorithm is not Algorithm.ring:
        link_gbs *= 0.8
    latency = np.full(len(sizes), _GENERIC_BASE_US[protocol] + n_hops * hop_us)
    transfer = sizes * (steps / n_ranks) / (1000.0 * link_gbs)
    return latency, latency + transfer
