"""Device memory that NCCL takes for connections, by the arithmetic of its sources.

A connection to one neighbour has, per channel, a buffer for each protocol. NCCL from 2.22 on connects an
algorithm at its first use, for *all* channels of the communicator (`ncclTransportRingConnect` and its
siblings in src/transport/generic.cc loop over `comm->nChannels`): how many channels a later call uses changes
nothing. What can be saved is an algorithm that is never used, or channels when the communicator is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from zerotune.store.records import Algorithm, CommunicatorClass

STEPS: Final = 8
LL_BYTES: Final = 8 * 512 * STEPS * 16
"""Lines per thread, threads, steps, bytes per line: init.cc's DEFAULT_LL_BUFFSIZE."""
LL128_BYTES: Final = 120 * 640 * STEPS * 8
"""Elements per thread, threads, steps, bytes per element: DEFAULT_LL128_BUFFSIZE."""
SIMPLE_BYTES: Final = 4 << 20
"""NCCL_BUFFSIZE's default (1 MiB on Arm)."""
NVLS_BYTES: Final = (128 << 10) * STEPS
"""nvlsChunkSize times steps, for each head, direction and channel."""


def n_neighbours(algorithm: Algorithm, communicator: CommunicatorClass) -> int:
    """Ranks that a rank in the middle exchanges data with under `algorithm`, counting both ways as one."""
    n_nodes, per_node = communicator.n_nodes, -(-communicator.n_ranks // communicator.n_nodes)
    if algorithm in (Algorithm.tree, Algorithm.nvls_tree):
        # Between nodes a parent and two children, within a node a chain.
        return min(communicator.n_ranks - 1, (3 if n_nodes > 1 else 1) + (1 if per_node > 1 else 0))
    if algorithm is Algorithm.pat:
        return 2 * max(1, (n_nodes - 1).bit_length())
    return 1


def channel_bytes(algorithm: Algorithm, communicator: CommunicatorClass, *, gpu_direct: bool = True) -> int:
    """Device memory of one channel of an algorithm on one rank.

    Over NVLink or PCIe the receiver holds the buffers (the sender holds Simple's instead where it is read
    from). Over a network both ends do, LL's but on the receiving side only.

    Args:
        algorithm: that is connected.
        communicator: whose ranks are connected.
        gpu_direct: the adapter reaches the GPU; False (sockets): buffers of the network are in host memory and take
            none.

    Returns:
        Bytes.
    """
    received = LL_BYTES + LL128_BYTES + SIMPLE_BYTES
    sent = LL128_BYTES + SIMPLE_BYTES
    over_network = (received + sent) if gpu_direct else 0
    per_node = -(-communicator.n_ranks // communicator.n_nodes)
    if algorithm in (Algorithm.nvls, Algorithm.nvls_tree):
        shared = 2 * per_node * NVLS_BYTES
        return shared + (3 * over_network if algorithm is Algorithm.nvls_tree else 0)
    neighbours = n_neighbours(algorithm, communicator)
    if communicator.n_nodes == 1:
        return neighbours * received
    if algorithm is Algorithm.tree and per_node > 1:
        return (neighbours - 1) * over_network + received
    return neighbours * over_network


def connection_mb(
    algorithm: Algorithm, communicator: CommunicatorClass, n_channels: int, *, gpu_direct: bool = True
) -> float:
    """Predicted device memory that connecting an algorithm takes, on one rank.

    Args:
        algorithm: that is connected.
        communicator: whose ranks are connected.
        n_channels: of the communicator; NCCL connects them all.
        gpu_direct: see `channel_bytes`.

    Returns:
        10^6 bytes.
    """
    return n_channels * channel_bytes(algorithm, communicator, gpu_direct=gpu_direct) / 1e6


def channels_within(limit_mb: float, channel_mb: float | None = None, fixed_mb: float = 0.0) -> int:
    """Most channels of a communicator whose ring fits into a limit.

    Args:
        limit_mb: device memory that the ring may take, 10^6 bytes.
        channel_mb: of one channel, a fabric's figure; None: what NCCL takes over a network.
        fixed_mb: whatever the channels, a fabric's figure.

    Returns:
        At least 1; 64 where channels cost nothing.
    """
    if channel_mb is None:
        channel_mb = connection_mb(Algorithm.ring, CommunicatorClass(2, 2), 1)
    return max(1, int((limit_mb - fixed_mb) / channel_mb)) if channel_mb > 0 else 64


def measured_mb(connect: Callable[[], None], used_bytes: Callable[[], int]) -> float:
    """Device memory, in 10^6 bytes, that stays in use after `connect`: what `connection_mb` predicts.

    `used_bytes` says what the whole device has in use (torch.cuda.mem_get_info, NVML), since NCCL does not
    allocate through torch; `connect` runs the algorithm once and waits for it.
    """
    before = used_bytes()
    connect()
    return (used_bytes() - before) / 1e6
