"""Leaves out settings that keep failing, or whose kind does, as each failure costs a restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from ....store.records import BASELINE, Collective, Outcome
from .grid import GridPoint

SETTING_FAILURES: Final = 2
"""A setting that failed at this many sizes of a collective is not tried at other sizes."""
KIND_FAILURES: Final = 3
"""An algorithm and protocol that failed this often and never worked is not tried any more."""

Kind = tuple[Collective, int | None, int | None]


def leave_out(points: Sequence[GridPoint]) -> None:
    """Mark points not to try any more; NCCL's own choice stays, as its setting differs by size."""
    broken = [point for point in points if point.outcome is not Outcome.ok and not point.is_left_out]
    if not broken:
        return
    settings = Counter((point.place.collective, point.candidate) for point in broken)
    kinds = Counter(_kind(point) for point in broken)
    works = {_kind(point) for point in points if point.duration_us}
    for point in points:
        if point.is_seen or point.candidate == BASELINE:
            continue
        n_failures = settings[point.place.collective, point.candidate]
        is_bad_kind = kinds[_kind(point)] >= KIND_FAILURES and _kind(point) not in works
        if n_failures >= SETTING_FAILURES or is_bad_kind:
            point.is_left_out, point.outcome = True, Outcome.failed


def _kind(point: GridPoint) -> Kind:
    return point.place.collective, point.candidate.algorithm, point.candidate.protocol
