"""NCCL 2.28.9's own cost model: NCCL's predictions, and hence its choice, for a topology.

Every cell (algorithm, protocol) of a collective costs `latency_us * L + message_bytes / (1000 * bandwidth)`
with bandwidths in GB/s of the whole buffer; a cell with bandwidth 0 is IGNORE (-1.0). The terms come from NCCL's
tuning tables and from a fabric's topology. They are computed once per topology and collective, so that a lookup takes
a few array operations. All figures are predictions, not measurements.

`message_bytes` is NCCL's nBytes, the whole buffer. `n_pipe_ops` is NCCL's numPipeOps: operations of one group that a
channel runs one after another. Costs are microseconds as float32; -1 (IGNORE) means that NCCL cannot run the cell.

tests/real_nccl compares every cell with the tables of NCCL's own library, in each release from 2.23 on.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from ...store.records import Algorithm, Candidate, Collective, Protocol
from .cell_terms import N_ALGORITHMS, N_PROTOCOLS, Topology, terms_of

IGNORE: Final = -1.0

WORK_ITEMS_PER_BATCH: Final = 10
"""Operations whose latencies overlap in one kernel batch, for all algorithms but ring."""

TRAFFIC_PER_CHANNEL_BYTES: Final = 16 << 10
"""NCCL opens no channel for less traffic than this."""

# All-reduce by tree: share of the modelled bandwidth by floor(log2(bytes / 64)).
_TREE_SHARE: Final = np.array(
    [
        [1.0] * 4 + [0.9, 0.8] + [0.7] * 4 + [0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9] + [1.0] * 5,
        [1.0] * 5 + [0.9] + [0.8] * 3 + [0.7] + [0.6] * 6 + [0.8] + [0.9] * 4 + [1.0, 1.0, 1.0],
        [0.9] * 7 + [0.8, 0.7, 0.6, 0.6] + [0.5] * 4 + [0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9],
    ],
    dtype=np.float32,
)

_N_TREE_SHARES: Final = 23
"""Trees use all columns of _TREE_SHARE but the last."""
_NVLS_TREE_SHARES_SINCE: Final = (2, 29)
"""From this release on, Blackwell's NVLSTree uses all columns of _TREE_SHARE."""

_MAX_THREADS = (512, 640, 512)
_BYTES_PER_THREAD = (8, 8, 64)
_NARROW_RING_GBS = 12.0
_NARROW_RING_THREADS = 256

_TERMS_DEPEND_ON_BYTES = (
    (Algorithm.ring, Protocol.simple),
    *((Algorithm.tree, protocol) for protocol in Protocol),
    (Algorithm.nvls_tree, Protocol.simple),
)


def cost_us(
    topology: Topology,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    message_bytes: npt.ArrayLike,
    n_pipe_ops: int = 1,
) -> npt.NDArray[np.float32]:
    """NCCL's prediction for one cell, of the shape of `message_bytes`, a number or an array of any shape."""
    cells = terms_of(topology, collective)
    bandwidth = cells.bandwidth_gbs[algorithm, protocol]
    sizes = np.asarray(message_bytes, dtype=np.int64)
    if bandwidth <= 0:
        return np.full(sizes.shape, IGNORE, dtype=np.float32)
    latency_us = np.full(sizes.shape, cells.latency_us[algorithm, protocol], dtype=np.float32)
    bandwidths = np.full(sizes.shape, bandwidth, dtype=np.float32)
    if collective is Collective.all_reduce:
        if algorithm is Algorithm.tree:
            bandwidths *= _tree_share(protocol, sizes, _N_TREE_SHARES)
        elif algorithm is Algorithm.nvls_tree:
            if topology.compute_capability >= 100 and topology.nccl_version >= _NVLS_TREE_SHARES_SINCE:
                bandwidths *= _tree_share(protocol, sizes, _N_TREE_SHARES + 1)
        elif algorithm is Algorithm.ring and protocol is Protocol.simple and topology.n_nodes > 1:
            # Plateau of large rings: latencies of consecutive chunks no longer overlap.
            plateau = sizes // (topology.comm_channels * topology.n_ranks) >= 64
            latency_us[plateau] *= np.float32(1.9 if topology.compute_capability < 80 else 1.4)
    n_latencies = n_pipe_ops if algorithm is Algorithm.ring else math.ceil(n_pipe_ops / WORK_ITEMS_PER_BATCH)
    return np.asarray(latency_us * np.float32(n_latencies) + sizes / (1000.0 * bandwidths), dtype=np.float32)


def cost_table(
    topology: Topology, collective: Collective, message_bytes: int, n_pipe_ops: int = 1
) -> npt.NDArray[np.float32]:
    """The cost table that NCCL passes to a tuner plugin for one call, by algorithm and protocol, shape (7, 3)."""
    cells = terms_of(topology, collective)
    pipeline = np.full((N_ALGORITHMS, 1), math.ceil(n_pipe_ops / WORK_ITEMS_PER_BATCH), dtype=np.float32)
    pipeline[Algorithm.ring] = n_pipe_ops
    bandwidth = cells.bandwidth_gbs
    table: npt.NDArray[np.float32] = cells.latency_us * pipeline
    with np.errstate(divide="ignore"):
        table = table + np.float32(message_bytes) / (np.float32(1000.0) * bandwidth)
    table[bandwidth <= 0] = IGNORE
    if collective is Collective.all_reduce:
        for algorithm, protocol in _TERMS_DEPEND_ON_BYTES:
            table[algorithm, protocol] = cost_us(topology, collective, algorithm, protocol, message_bytes, n_pipe_ops)
    return table


@lru_cache(maxsize=4096)
def default_choice(
    topology: Topology,
    collective: Collective,
    message_bytes: int,
    n_pipe_ops: int = 1,
    *,
    redop_is_sum: bool = True,
) -> Candidate:
    """NCCL's choice without a tuner: the cell with the lowest predicted cost, the first of equal ones.

    Without `redop_is_sum` the reduction averages floats, for which PAT and NVLS have no reduce_scatter. If no cell is
    available, this raises `ValueError`; NCCL fails then, too.
    """
    table = cost_table(topology, collective, message_bytes, n_pipe_ops)
    if collective is Collective.reduce_scatter and not redop_is_sum:
        table[[Algorithm.pat, Algorithm.nvls]] = IGNORE
    costs = np.where(table < 0, np.inf, table).ravel()
    winner = int(np.argmin(costs))
    if not np.isfinite(costs[winner]):
        raise ValueError(f"no algorithm is available for {collective.name} on {topology.n_ranks} ranks")
    algorithm, protocol = Algorithm(winner // N_PROTOCOLS), Protocol(winner % N_PROTOCOLS)
    return Candidate(
        algorithm,
        protocol,
        default_channels(topology, collective, algorithm, protocol, message_bytes),
    )


def default_channels(
    topology: Topology, collective: Collective, algorithm: Algorithm, protocol: Protocol, message_bytes: int
) -> int:
    """Channels that NCCL uses for a collective if the plugin has no opinion, at least 1."""
    if algorithm in (Algorithm.nvls, Algorithm.nvls_tree):
        return max(1, min(topology.nvls_channels, topology.comm_channels))
    n_channels = topology.comm_channels
    if algorithm is not Algorithm.pat:
        bytes_per_channel = _max_threads(topology, algorithm, protocol) * _BYTES_PER_THREAD[protocol]
        if algorithm is Algorithm.ring and protocol is Protocol.ll:
            bytes_per_channel *= topology.n_ranks
        n_channels = max(1, min(n_channels, message_bytes // bytes_per_channel))
    return channels_used(collective, protocol, message_bytes, n_channels)


def channels_used(collective: Collective, protocol: Protocol, message_bytes: int, n_channels: int) -> int:
    """Channels that really run, 1 to `n_channels`: fewer than `n_channels` if there is little traffic.

    LL sends a flag with every 4 bytes; NCCL counts its traffic four times.
    """
    return math.ceil(channels_filled(collective, protocol, message_bytes, n_channels))


def in_effect(collective: Collective, message_bytes: int, candidate: Candidate) -> Candidate:
    """The setting with the channels that really run: with little traffic, some channel counts have the same effect."""
    if candidate.algorithm is None or candidate.protocol is None or not candidate.n_channels:
        return candidate
    n_channels = channels_used(collective, candidate.protocol, message_bytes, candidate.n_channels)
    return Candidate(candidate.algorithm, candidate.protocol, n_channels)


def channels_filled(collective: Collective, protocol: Protocol, message_bytes: int, n_channels: int) -> float:
    """As `channels_used`, but the last channel counts by its share of traffic, so that the result has a fraction."""
    traffic_bytes = message_bytes * (2 if collective is Collective.all_reduce else 1)
    traffic_bytes *= 4 if protocol is Protocol.ll else 1
    return max(1.0, min(float(n_channels), traffic_bytes / TRAFFIC_PER_CHANNEL_BYTES))


def _max_threads(topology: Topology, algorithm: Algorithm, protocol: Protocol) -> int:
    narrow = topology.ring_bw_intra_gbs * topology.ring_channels <= _NARROW_RING_GBS
    if algorithm is Algorithm.ring and protocol is Protocol.simple and narrow:
        return _NARROW_RING_THREADS
    return _MAX_THREADS[protocol]


def _tree_share(protocol: Protocol, sizes: npt.NDArray[np.int64], n_shares: int) -> npt.NDArray[np.float32]:
    # frexp gives the exponent exactly: floor(log2(x)) = exponent - 1, and -1 for x = 0.
    octave = np.frexp((sizes >> 6).astype(np.float64))[1] - 1
    row = _TREE_SHARE[protocol, :n_shares]
    inside = (octave >= 0) & (octave < len(row))
    return np.where(inside, row[np.clip(octave, 0, len(row) - 1)], np.float32(1.0))


