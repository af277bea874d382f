"""Collectives that NCCL runs, and the settings that a plan may request.

The integers are NCCL's own (nccl_tuner.h): plugin, wire and store need no translation.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from .numbers import U32


class Collective(IntEnum):
    """Collective operations, with the values of NCCL's `ncclFunc_t`."""

    broadcast = 0
    reduce = 1
    all_gather = 2
    reduce_scatter = 3
    all_reduce = 4
    send_recv = 5
    send = 6
    recv = 7
    all_to_all = 8
    scatter = 9
    gather = 10


class Algorithm(IntEnum):
    """NCCL algorithms, with NCCL's values."""

    tree = 0
    ring = 1
    collnet_direct = 2
    collnet_chain = 3
    nvls = 4
    nvls_tree = 5
    pat = 6


class Protocol(IntEnum):
    """NCCL protocols, with NCCL's values."""

    ll = 0
    ll128 = 1
    simple = 2


MIN_CHUNK_BYTES: Final = 4096
MAX_CHUNK_BYTES: Final = 32 * 2**20
"""ZT_MIN_CHUNK_KIB and ZT_MAX_CHUNK_KIB of zerotune_plugin.h; NCCL itself caps a chunk to its buffers."""


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True):
    """One setting: algorithm, protocol, channel count, chunk size. Settings sort by their names.

    `algorithm` and `protocol` are both None (leave NCCL's choice alone) or both set. An algorithm alone ("tree/any")
    ran under an unknown protocol: it is recorded and compared as one setting, and never requested.
    `n_channels` 0 and `chunk_bytes` 0 mean no opinion. NCCL asks plugins for chunk sizes from 2.30 on.
    """

    algorithm: Algorithm | None = None
    protocol: Protocol | None = None
    n_channels: int = 0
    chunk_bytes: int = 0

    def __post_init__(self) -> None:
        if self.algorithm is None and self.protocol is not None:
            raise ValueError(f"protocol {self.protocol} without an algorithm: set both or neither")
        if not 0 <= self.n_channels <= 64:
            raise ValueError(f"n_channels {self.n_channels} is outside 0..64")
        if self.chunk_bytes and not (
            MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES and self.chunk_bytes % 1024 == 0
        ):
            raise ValueError(f"chunk_bytes {self.chunk_bytes} is neither 0 nor whole KiB from 4 KiB to 32 MiB")

    @property
    def is_baseline(self) -> bool:
        """True if this requests nothing of NCCL."""
        return self.algorithm is None and self.n_channels == 0 and self.chunk_bytes == 0

    @property
    def lacks_protocol(self) -> bool:
        """True if an algorithm ran under an unknown protocol, which a plan cannot request."""
        return self.algorithm is not None and self.protocol is None

    @property
    def is_half(self) -> bool:
        """True if a part of what ran is unknown, so no candidate is known to have run."""
        return self.protocol is None and not self.is_baseline

    def __str__(self) -> str:
        if self.is_baseline:
            return "baseline"
        channels = f"/{self.n_channels}ch" if self.n_channels else ""
        channels += f"/{self.chunk_bytes // 1024}KiB" if self.chunk_bytes else ""
        if self.algorithm is None:
            return f"any{channels}"
        return f"{self.algorithm.name}/{'any' if self.protocol is None else self.protocol.name}{channels}"


BASELINE: Final = Candidate()


class CommunicatorClass(msgspec.Struct, frozen=True, order=True):
    """Communicators of `n_ranks` ranks on `n_nodes` nodes, which share decisions."""

    n_ranks: U32
    n_nodes: U32

    def __str__(self) -> str:
        ranks = "1 rank" if self.n_ranks == 1 else f"{self.n_ranks:,} ranks"
        return f"{ranks} on 1 node" if self.n_nodes == 1 else f"{ranks} on {self.n_nodes:,} nodes"
