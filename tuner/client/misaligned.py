"""Misaligned collectives, which padding would make fast, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...store.misaligned import ALIGNMENT_BYTES, Misaligned

MOST_NAMED: Final = 3
"""Most sizes in words, the largest first; `--json` has all."""


def to_be_padded(sizes: Sequence[Misaligned]) -> Iterator[str]:
    """Sentences about collectives that NCCL moves in small pieces, and the sizes that would be fast."""
    for one in sizes[:MOST_NAMED]:
        yield (
            f"{one.collective.name} of {one.message_bytes:,} bytes on {one.n_ranks} ranks: a share of"
            f" {one.share_bytes:,} bytes is no multiple of {ALIGNMENT_BYTES}, which NCCL moves in small pieces; padded"
            f" to {one.fast_share_bytes:,} ({one.fast_bytes:,} in all) it is fast"
        )
    if len(sizes) > MOST_NAMED:
        yield f"{len(sizes) - MOST_NAMED} more sizes are misaligned"
