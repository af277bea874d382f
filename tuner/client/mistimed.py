"""Collectives without times of their own, in words."""

from __future__ import annotations

from collections.abc import Iterator

from ...store.counted import counted
from ...store.records.passages import Passages


def mistimed(passages: Passages) -> Iterator[str]:
    """Sentences about collectives without times, and the remedy; none if all have times."""
    if n := passages.n_impossible_times:
        yield (
            f"NCCL told {counted(n, 'collective')} the times of other calls, which are left out: those of later calls,"
            " where its thread came late, or, from 2.31 on, behind calls that it tells no profiler of, such as"
            " broadcasts (NCCL 2.30 and older do not)"
        )
    if n := passages.n_inseparable:
        yield f"{counted(n, 'decision')} not timed: the kernel carried collectives of others, too, or of half a group"
