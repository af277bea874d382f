"""Settings that are no longer tried, because they or their kind keep failing: each failure costs a restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from zerotune.store.records import BASELINE, Collective, Outcome
from zerotune.tuner.offline.sweep.cells import Cell

SETTING_FAILURES: Final = 2
"""A setting that broke at this many sizes of a collective is not tried at the others."""
KIND_FAILURES: Final = 3
"""An algorithm and protocol that broke this often and never worked is not tried either."""

Kind = tuple[Collective, int | None, int | None]


def leave_out(cells: Sequence[Cell]) -> None:
    """Mark the cells that are not to be tried any more; NCCL's own choice, another setting at every size, stays."""
    broken = [cell for cell in cells if cell.outcome is not Outcome.ok and not cell.is_left_out]
    if not broken:
        return
    settings = Counter((cell.place.collective, cell.candidate) for cell in broken)
    kinds = Counter(_kind(cell) for cell in broken)
    works = {_kind(cell) for cell in cells if cell.duration_us}
    for cell in cells:
        if cell.is_seen or cell.candidate == BASELINE:
            continue
        n_failures = settings[cell.place.collective, cell.candidate]
        is_bad_kind = kinds[_kind(cell)] >= KIND_FAILURES and _kind(cell) not in works
        if n_failures >= SETTING_FAILURES or is_bad_kind:
            cell.is_left_out, cell.outcome = True, Outcome.failed


def _kind(cell: Cell) -> Kind:
    return cell.place.collective, cell.candidate.algorithm, cell.candidate.protocol
