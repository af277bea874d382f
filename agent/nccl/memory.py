"""Device memory that NCCL takes for connections, by the arithmetic of its sources, and as its library takes it.

A connection to one neighbour has, per channel, a buffer for each protocol. What an algorithm shares with one that is
connected already is taken once, so predictions are the most that it can be. NCCL from 2.22 on connects an algorithm at
its first use, for *all* channels of the communicator (`ncclTransportRingConnect` and its siblings in
src/transport/generic.cc loop over `comm->nChannels`): how many channels a later call uses changes nothing. What can be
saved is an algorithm that is never used, or channels when the communicator is made.
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
"""What device memory is handed out in."""
NVLS_BYTES: Final = (128 << 10) * STEPS
"""nvlsChunkSize times steps, for each head, direction and channel."""


def n_neighbours(algorithm: Algorithm, communicator: CommunicatorClass) -> int:
    """Ranks that a rank in the middle exchanges data with under `algorithm`, counting both ways as one."""
    n_nodes, per_node = communicator.n_nodes, -(-communicator.n_ranks // communicator.n_nodes)
    if algorithm in (Algorithm.tree, Algorithm.nvls_tree):
        # Between nodes a parent and two children, within a node a chain.
        return min(communicator.n_ranks - 1, _nodes_beside(n_nodes) + (1 if per_node > 1 else 0))
    if algorithm is Algorithm.pat:
        return 2 * max(1, (n_nodes - 1).bit_length())
    return 1


def channel_bytes(algorithm: Algorithm, communicator: CommunicatorClass) -> int:
    """The most device memory that one channel of an algorithm takes on one rank.

    Over NVLink or PCIe the receiver holds the buffers (the sender holds Simple's instead where it is read
    from), and the sender a block for where both are. Over a network both ends do, LL's but on the receiving side only.

    Args:
        communicator: whose ranks are connected. The network is taken to reach GPU memory: else (sockets) buffers are in
            host memory.

    Returns:
        Bytes.
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
    """The most device memory that connecting an algorithm takes, on one rank.

    Returns:
        10^6 bytes.
    """
    return n_channels * channel_bytes(algorithm, communicator) / 1e6


def channels_within(limit_mb: float, channel_mb: float | None = None, fixed_mb: float = 0.0) -> int:
    """Most channels of a communicator whose ring fits into a limit.

    Args:
        limit_mb: device memory that the ring may take, 10^6 bytes.
        channel_mb: of one channel, a fabric's figure; None: what NCCL takes over a network.

    Returns:
        At least 1; 64 where channels cost nothing.
    """
    if channel_mb is None:
        channel_mb = connection_mb(Algorithm.ring, CommunicatorClass(2, 2), 1)
    return max(1, int((limit_mb - fixed_mb) / channel_mb)) if channel_mb > 0 else 64


def _in_blocks(n_bytes: int) -> int:
    return -(-n_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _nodes_beside(n_nodes: int) -> int:
    """Nodes that a node exchanges data with in a tree; 1: there is one node, whose ranks are a chain."""
    return min(3, max(1, n_nodes - 1))
