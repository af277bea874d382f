"""Bytes and times of collectives with and without the tuner's decision; and plugins of others."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Annotated, Final, Literal

import msgspec

MOST: Final = 2**63 - 1
MAX_OTHERS: Final = 8
"""A process has two at most; ranks may differ, and are not tuned then."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class PassageKind(IntEnum):
    """How collectives came to run; the tuner could decide only `decided` ones."""

    decided = 0
    unknown = 1
    """No tuner was asked, and NCCL does not say why."""
    symmetric = 2
    """Symmetric kernels, on registered windows (profiler ABI v7)."""
    copy_engine = 3
    """Copies without a kernel (profiler ABI v6)."""
    point_to_point = 4
    """Sends, including those of all_to_all."""


class Passage(msgspec.Struct, frozen=True):
    """Observed collectives of one kind."""

    kind: PassageKind
    n_calls: Count
    message_bytes: Count
    n_timed: Count = 0
    """Calls whose kernels were timed; `kernel_us` is their sum."""
    kernel_us: Annotated[float, msgspec.Meta(ge=0, le=1e300)] = 0.0


class OtherPlugin(msgspec.Struct, frozen=True):
    """A plugin of others, which NCCL would have loaded instead of ours."""

    role: Literal["tuner", "profiler"]
    name: Annotated[str, msgspec.Meta(max_length=64, pattern=r"\A[ -~]*\Z")]
    """The plugin's own name, in printable ASCII; empty: it could not run beside ours."""
    n_faults: Count = 0
    """Errors and unusable answers."""


class Passages(msgspec.Struct, frozen=True):
    """All that one rank, or several, have observed."""

    kinds: Annotated[tuple[Passage, ...], msgspec.Meta(max_length=len(PassageKind))] = ()
    n_one_rank_communicators: Count = 0
    """NCCL reports their collectives, which are copies, to no plugin."""
    others: Annotated[tuple[OtherPlugin, ...], msgspec.Meta(max_length=MAX_OTHERS)] = ()
    n_impossible_times: Count = 0
    """Kernel times from NCCL that cannot be the collective's; they are left out."""
    n_inseparable: Count = 0
    """Decisions without a time: their kernel served others, too, or some of their collectives were not observed."""


def summed(ranks: Iterable[Passages]) -> Passages:
    """Sums over several ranks, up to what a 64-bit column holds."""
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
