"""Device memory that NCCL allocates for connections, by the arithmetic of its sources.

A connection to one neighbour has, per channel, a buffer for each protocol. An algorithm may share buffers with another
one that is connected already, so predictions are upper bounds. NCCL from 2.22 on connects an algorithm at its first
use, for *all* channels of the communicator (`ncclTransportRingConnect` and its siblings in src/transport/generic.cc
loop over `comm->nChannels`). So the channel count of a later call changes nothing. A job saves memory only if it never
uses an algorithm, or if its communicators are made with fewer channels.
"""

from __future__ import annotations

from typing import Final

from ...store.records import Algorithm, CommunicatorClass

STEPS: Final = 8
LL_BYTES: Final = 8 * 512 * STEPS * 16
"""Lines per thread, threads, steps, bytes per line: init.cc's DEFAULT_LL_BUFFSIZE."""
LL128_BYTES: Final = 120 * 640 * STEPS * 8
"""Elements per thread, threads, steps, bytes per element: DEFAULT_LL128_BUFFSIZE."""
SIMPLE_BYTES: Final = 4 << 20
"""NCCL_BUFFSIZE's default (1 MiB on Arm)."""
BLOCK_BYTES: Final = 2 << 20
"""The unit in which device memory is allocated."""
NVLS_BYTES: Final = (128 << 10) * STEPS
"""nvlsChunkSize times steps, per head, direction and channel."""


def n_neighbours(algorithm: Algorithm, communicator: CommunicatorClass) -> int:
    """Connections of an inner rank under `algorithm`; both directions to a neighbour count as one."""
    n_nodes, per_node = communicator.n_nodes, -(-communicator.n_ranks // communicator.n_nodes)
    if algorithm in (Algorithm.tree, Algorithm.nvls_tree):
        # A parent and two children between nodes, a chain within a node.
        return min(communicator.n_ranks - 1, _nodes_beside(n_nodes) + (1 if per_node > 1 else 0))
    if algorithm is Algorithm.pat:
        return 2 * max(1, (n_nodes - 1).bit_length())
    return 1


def channel_bytes(algorithm: Algorithm, communicator: CommunicatorClass) -> int:
    """The most device memory that one channel of an algorithm takes on one rank, in bytes.

    Over NVLink or PCIe the receiver has the buffers, and the sender a block for both ends' positions. If the receiver
    reads from the sender, Simple's buffer is at the sender. Over a network both ends have buffers, but LL's is at the
    receiver only. The network is assumed to reach GPU memory; else (sockets) buffers are in host memory.
    """
    received = _in_blocks(LL_BYTES + LL128_BYTES + SIMPLE_BYTES)
    within_node = received + BLOCK_BYTES
    over_network = received + _in_blocks(LL128_BYTES + SIMPLE_BYTES)
    n_nodes, per_node = communicator.n_nodes, -(-communicator.n_ranks // communicator.n_nodes)
    if algorithm in (Algorithm.nvls, Algorithm.nvls_tree):
        shared = 2 * per_node * NVLS_BYTES
        return shared + (_nodes_beside(n_nodes) * over_network if algorithm is Algorithm.nvls_tree else 0)
    neighbours = n_neighbours(algorithm, communicator)
    if n_nodes == 1:
        return neighbours * within_node
    if algorithm is Algorithm.tree and per_node > 1:
        return (neighbours - 1) * over_network + within_node
    return neighbours * over_network


def connection_mb(algorithm: Algorithm, communicator: CommunicatorClass, n_channels: int) -> float:
    """The most device memory that connecting an algorithm takes on one rank."""
    return n_channels * channel_bytes(algorithm, communicator) / 1e6


def channels_within(limit_mb: float, channel_mb: float | None = None, fixed_mb: float = 0.0) -> int:
    """Most channels of a communicator whose ring fits into a limit, at least 1.

    Both figures are in 10^6 bytes. `channel_mb` is the memory of one channel; None: NCCL's over a network.
    """
    if channel_mb is None:
        channel_mb = connection_mb(Algorithm.ring, CommunicatorClass(2, 2), 1)
    return max(1, int((limit_mb - fixed_mb) / channel_mb)) if channel_mb > 0 else 64


def _in_blocks(n_bytes: int) -> int:
    return -(-n_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _nodes_beside(n_nodes: int) -> int:
    """Neighbours of a node in a tree; 1 for a single node, whose ranks are a chain."""
    return min(3, max(1, n_nodes - 1))
