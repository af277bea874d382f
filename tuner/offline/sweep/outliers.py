"""Samples that contradict each other: where they do, and what to look at again before anything is chosen there.

A shared network or GPU makes single calls several times slower, often for a range of sizes and for hours. No smooth
opinion can tell such a place from a slow setting; only a second sample can. So what contradicts itself, or leaps
out of both its neighbours, is looked at again at once; where that keeps happening (a *rough* place), all settings that
may still win get a few samples each, and their own medians choose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from zerotune.store.records import Candidate, Collective, Outcome
from zerotune.tuner.offline.sweep.cells import Cell, Place

OUTLIER_RATIO: Final = 1.3
"""Two samples, or a sample and both its neighbours, that differ by more are looked into."""
ROUGH_SHARE: Final = 0.2
"""A place is rough when more of the repeated cells around it contradict themselves."""
ROUGH_SAMPLES: Final = 4
"""Samples per setting that may still win at a rough place."""
_NEAR_OCTAVES: Final = 1.0
_NEAR_DOUBT: Final = 1.0
"""Prior: this many cells with agreeing samples are assumed at every place."""
_DOUBT: Final = 5
"""Prior for the sweep as a whole: this many cells with agreeing samples."""


def outlier_share(cells: Iterable[Cell]) -> float:
    """Share of the repeated cells whose samples contradict each other."""
    repeated = _repeated(cells)
    return sum(_differ(cell.duration_us) for cell in repeated) / (len(repeated) + _DOUBT)


def roughness(cells: Sequence[Cell]) -> dict[Place, float]:
    """By place of one collective, the share of repeated cells that contradict themselves: near sizes count more."""
    repeated = _repeated(cells)
    at = np.array([math.log2(cell.place.message_bytes) for cell in repeated])
    differs = np.array([_differ(cell.duration_us) for cell in repeated], np.float64)
    found = {}
    for place in {cell.place for cell in cells}:
        weights = np.exp(-np.abs(at - math.log2(place.message_bytes)) / _NEAR_OCTAVES)
        found[place] = float(weights @ differs / (weights.sum() + _NEAR_DOUBT))
    return found


def contradictions(cells: Iterable[Cell]) -> list[Cell]:
    """Cells of two samples that differ: one is an outlier, and only more can tell which."""
    return [cell for cell in cells if len(cell.duration_us) == 2 and _is_ok(cell) and _differ(cell.duration_us)]


def leaps(cells: Iterable[Cell]) -> list[Cell]:
    """Single samples above, or below, what the same setting takes at the next smaller and the next larger size seen."""
    by_setting: dict[tuple[Collective, Candidate], list[Cell]] = {}
    for cell in cells:
        if cell.duration_us and _is_ok(cell):
            by_setting.setdefault((cell.place.collective, cell.candidate), []).append(cell)
    found = []
    for series in by_setting.values():
        series.sort(key=lambda cell: cell.place)
        for below, cell, above in zip(series, series[1:], series[2:], strict=False):
            near_us = sorted((below.median_us, above.median_us))
            leaps_out = cell.median_us > OUTLIER_RATIO * near_us[1] or cell.median_us * OUTLIER_RATIO < near_us[0]
            if leaps_out and len(cell.duration_us) == 1:
                found.append(cell)
    return found


def contenders(cells: Iterable[Cell]) -> list[Cell]:
    """Cells of one place that may still win: out is who never was as fast as the leader's slowest sample."""
    usable = [cell for cell in cells if _is_ok(cell)]
    repeated = _repeated(usable)
    if not repeated:
        return usable
    limit_us = max(min(repeated, key=lambda cell: cell.median_us).duration_us)
    return [cell for cell in usable if len(cell.duration_us) < 2 or min(cell.duration_us) <= limit_us]


def leader(cells: Iterable[Cell]) -> Cell | None:
    """The fastest by its own samples, of those that may still win, once each of these has two; None before."""
    rivals = contenders(cells)
    if any(len(cell.duration_us) < 2 for cell in rivals):
        return None
    return min(rivals, key=lambda cell: cell.median_us, default=None)


def rough_looks(by_place: dict[Place, list[Cell]], roughness_of: dict[Place, float]) -> list[Cell]:
    """At every rough place the contender with the fewest samples; those that have fewest of all come first, alone."""
    found = []
    for place, cells in by_place.items():
        rivals = contenders(cells)
        if roughness_of[place] > ROUGH_SHARE and len(rivals) > 1:
            found.append(min(rivals, key=lambda cell: len(cell.duration_us)))
    fewest = min((len(cell.duration_us) for cell in found), default=0)
    return [cell for cell in found if len(cell.duration_us) == fewest] if fewest < ROUGH_SAMPLES else []


def _repeated(cells: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in cells if len(cell.duration_us) > 1]


def _is_ok(cell: Cell) -> bool:
    return cell.outcome is Outcome.ok


def _differ(duration_us: Sequence[float]) -> bool:
    return max(duration_us) > OUTLIER_RATIO * min(duration_us)
