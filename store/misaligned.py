"""Collectives whose shares are no multiple of 16 bytes, which NCCL moves in small pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from .records import Collective, MessageBytes, Protocol

ALIGNMENT_BYTES: Final = 16
"""NCCL's kernels move 16 bytes at a time where all addresses are multiples of that, else one element at a time
(`reduceCopy` in NCCL's src/device/common_kernel.h, lines 236 to 252 of 2.28.9)."""
SHARED_OUT: Final = (Collective.all_gather, Collective.reduce_scatter)
"""Rank r's share begins at r times its bytes. Others are cut by NCCL itself, at aligned places."""
MIN_SHARE_BYTES: Final = 4096
"""Of smaller ones the latency is all that counts."""
MAX_MISALIGNED: Final = 64
"""Sizes that one job can have here."""


class Misaligned(msgspec.Struct, frozen=True, order=True):
    """Collectives of one size that NCCL runs slowly."""

    message_bytes: MessageBytes
    """Total, as NCCL counts them."""
    n_ranks: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]
    collective: Collective

    @property
    def share_bytes(self) -> int:
        """What one rank gives to a gather, or gets of a scatter."""
        return self.message_bytes // self.n_ranks

    @property
    def fast_share_bytes(self) -> int:
        """To what the share must be padded."""
        return -(-self.share_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def fast_bytes(self) -> int:
        """The collective's bytes then."""
        return self.fast_share_bytes * self.n_ranks


def misaligned(ran: Iterable[tuple[int, int, int, int]]) -> tuple[Misaligned, ...]:
    """Those of what ran that are misaligned, the largest first.

    Args:
        ran: collective, ranks, total bytes and protocol (255: not known). The LL protocol moves eight bytes at a time
            whatever the address, so that alignment is nothing to it.

    Returns:
        At most MAX_MISALIGNED sizes.
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
