"""Collectives whose shares are no multiple of 16 bytes, which NCCL moves in small pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from .records import Collective, MessageBytes, Protocol

ALIGNMENT_BYTES: Final = 16
"""NCCL's kernels move 16 bytes at a time if all addresses are multiples of 16, else one element at a time
(`reduceCopy` in NCCL's src/device/common_kernel.h, lines 236 to 252 of 2.28.9)."""
SHARED_OUT: Final = (Collective.all_gather, Collective.reduce_scatter)
"""Rank r's share begins at r times the share's bytes. NCCL itself cuts other collectives at aligned addresses."""
MIN_SHARE_BYTES: Final = 4096
"""For smaller shares only the latency counts."""
MAX_MISALIGNED: Final = 64
"""Sizes that are kept for one job."""


class Misaligned(msgspec.Struct, frozen=True, order=True):
    """Collectives of one size that NCCL runs slowly."""

    message_bytes: MessageBytes
    """NCCL's total size of the call."""
    n_ranks: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]
    collective: Collective

    @property
    def share_bytes(self) -> int:
        """Bytes that one rank contributes to an all-gather, or receives from a reduce-scatter."""
        return self.message_bytes // self.n_ranks

    @property
    def fast_share_bytes(self) -> int:
        """The share's size after padding to the alignment."""
        return -(-self.share_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def fast_bytes(self) -> int:
        """The collective's total size after padding."""
        return self.fast_share_bytes * self.n_ranks


def misaligned(ran: Iterable[tuple[int, int, int, int]]) -> tuple[Misaligned, ...]:
    """The misaligned collectives, the largest first; at most MAX_MISALIGNED.

    Args:
        ran: collective, ranks, total bytes and protocol (255: unknown) of each collective that ran. The LL protocol
            moves eight bytes at a time at any address, so alignment does not matter to it.
    """
    found = {
        Misaligned(message_bytes, n_ranks, Collective(collective))
        for collective, n_ranks, message_bytes, protocol in ran
        if collective in SHARED_OUT
        and n_ranks > 1
        and protocol != Protocol.ll
        and message_bytes % (ALIGNMENT_BYTES * n_ranks)
        and message_bytes // n_ranks >= MIN_SHARE_BYTES
    }
    return tuple(sorted(found, reverse=True)[:MAX_MISALIGNED])
