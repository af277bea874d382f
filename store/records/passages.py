"""What ran by the tuner's decision, and what passed it by, as sums of bytes and times; whose plugins ran beside."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Annotated, Final, Literal

import msgspec

MOST: Final = 2**63 - 1
MAX_OTHERS: Final = 8
"""Two in one process; ranks may differ, and are not tuned then."""
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


class OtherPlugin(msgspec.Struct, frozen=True):
    """Another's plugin, which NCCL would have loaded in the place of ours."""

    role: Literal["tuner", "profiler"]
    name: Annotated[str, msgspec.Meta(max_length=64, pattern=r"\A[ -~]*\Z")]
    """What it calls itself, in printable ASCII; empty: it could not be run beside ours."""
    n_faults: Count = 0
    """Its errors and unusable answers."""


class Passages(msgspec.Struct, frozen=True):
    """Everything that one rank, or several, saw so far."""

    kinds: Annotated[tuple[Passage, ...], msgspec.Meta(max_length=len(PassageKind))] = ()
    """One for each kind that was seen."""
    n_one_rank_communicators: Count = 0
    """What these run is a copy that NCCL tells no plugin of."""
    others: Annotated[tuple[OtherPlugin, ...], msgspec.Meta(max_length=MAX_OTHERS)] = ()
    n_impossible_times: Count = 0
    """Kernels' times that NCCL told, and that cannot be those of the collective: left out."""
    n_inseparable: Count = 0
    """Decisions whose kernel carried those of others, too, or not all of whose collectives were seen: not timed."""


def summed(ranks: Iterable[Passages]) -> Passages:
    """What several ranks saw; sums stop at what a 64-bit column holds."""
    ranks = list(ranks)
    kinds = []
    for kind in PassageKind:
        seen = [each for rank in ranks for each in rank.kinds if each.kind is kind]
        if seen:
            sums = (min(sum(getattr(each, name) for each in seen), MOST) for name in Passage.__struct_fields__[1:])
            kinds.append(Passage(kind, *sums))
    faults: dict[tuple[Literal["tuner", "profiler"], str], int] = {}
    for other in (other for rank in ranks for other in rank.others):
        faults[other.role, other.name] = min(faults.get((other.role, other.name), 0) + other.n_faults, MOST)
    others = tuple(OtherPlugin(role, name, n) for (role, name), n in faults.items())[:MAX_OTHERS]
    counts = (
        min(sum(getattr(rank, name) for rank in ranks), MOST)
        for name in ("n_one_rank_communicators", "n_impossible_times", "n_inseparable")
    )
    n_one_rank_communicators, n_impossible_times, n_inseparable = counts
    return Passages(tuple(kinds), n_one_rank_communicators, others, n_impossible_times, n_inseparable)
