"""What ran by the tuner's decision, and what passed it by: sums of bytes and of kernels' times."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Annotated, Final

import msgspec

MOST: Final = 2**63 - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class PassageKind(IntEnum):
    """How collectives came to run; all but `decided` passed the tuner by."""

    decided = 0
    unknown = 1
    """No tuner was asked, and NCCL does not say why."""
    symmetric = 2
    """Symmetric kernels, on registered windows (profiler ABI v7)."""
    copy_engine = 3
    """Copies without a kernel (profiler ABI v6)."""
    point_to_point = 4
    """Sends, those of all_to_all among them."""


class Passage(msgspec.Struct, frozen=True):
    """What ran in one way, while it was observed."""

    kind: PassageKind
    n_calls: Count
    message_bytes: Count
    n_timed: Count = 0
    """Calls whose kernels were timed: `kernel_us` is theirs."""
    kernel_us: Annotated[float, msgspec.Meta(ge=0, le=1e300)] = 0.0


class Passages(msgspec.Struct, frozen=True):
    """Everything that one rank, or several, saw so far."""

    kinds: Annotated[tuple[Passage, ...], msgspec.Meta(max_length=len(PassageKind))] = ()
    """One for each kind that was seen."""
    n_one_rank_communicators: Count = 0
    """What these run is a copy that NCCL tells no plugin of."""


def summed(ranks: Iterable[Passages]) -> Passages:
    """What several ranks saw; sums stop at what a 64-bit column holds."""
    ranks = list(ranks)
    kinds = []
    for kind in PassageKind:
        seen = [each for rank in ranks for each in rank.kinds if each.kind is kind]
        if seen:
            sums = (min(sum(getattr(each, name) for each in seen), MOST) for name in Passage.__struct_fields__[1:])
            kinds.append(Passage(kind, *sums))
    return Passages(tuple(kinds), min(sum(rank.n_one_rank_communicators for rank in ranks), MOST))
