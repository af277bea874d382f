"""Finds samples that contradict each other, and the points to measure again before a choice.

A shared network or GPU makes single calls several times slower, often for a range of sizes and for hours. No smooth
model can distinguish such a place from a slow setting; only a second sample can. So a point whose samples differ, or
that differs from both its neighbours, is measured again at once. If many points of a place differ (a *rough* place),
all settings that may still win get a few samples each, and their own medians decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from ....store.records import Candidate, Collective, Outcome
from .grid import GridPoint, Place

OUTLIER_RATIO: Final = 1.3
"""Points are measured again if two samples, or a sample and both its neighbours, differ by more."""
ROUGH_SHARE: Final = 0.2
"""A place is rough if a larger share of repeated points around it contradict themselves."""
ROUGH_SAMPLES: Final = 4
"""Samples at a rough place for each setting that may still win."""
_NEAR_OCTAVES: Final = 1.0
_NEAR_DOUBT: Final = 1.0
"""Prior: this many points with agreeing samples are assumed at every place."""
_DOUBT: Final = 5
"""Prior for the sweep as a whole: this many points with agreeing samples."""


def outlier_share(points: Iterable[GridPoint]) -> float:
    """Share of the repeated points whose samples contradict each other."""
    repeated = _repeated(points)
    return sum(_differ(point.duration_us) for point in repeated) / (len(repeated) + _DOUBT)


def roughness(points: Sequence[GridPoint]) -> dict[Place, float]:
    """Share of repeated points that contradict themselves, by place of one collective; near sizes count more."""
    repeated = _repeated(points)
    at = np.array([math.log2(point.place.message_bytes) for point in repeated])
    differs = np.array([_differ(point.duration_us) for point in repeated], np.float64)
    found = {}
    for place in {point.place for point in points}:
        weights = np.exp(-np.abs(at - math.log2(place.message_bytes)) / _NEAR_OCTAVES)
        found[place] = float(weights @ differs / (weights.sum() + _NEAR_DOUBT))
    return found


def contradictions(points: Iterable[GridPoint]) -> list[GridPoint]:
    """Points with two samples that differ: one is an outlier, and only more samples can show which."""
    return [point for point in points if len(point.duration_us) == 2 and _is_ok(point) and _differ(point.duration_us)]


def leaps(points: Iterable[GridPoint]) -> list[GridPoint]:
    """Points with one sample far above, or below, the same setting at both neighbouring sizes."""
    by_setting: dict[tuple[Collective, Candidate], list[GridPoint]] = {}
    for point in points:
        if point.duration_us and _is_ok(point):
            by_setting.setdefault((point.place.collective, point.candidate), []).append(point)
    found = []
    for series in by_setting.values():
        series.sort(key=lambda point: point.place)
        for below, point, above in zip(series, series[1:], series[2:], strict=False):
            near_us = sorted((below.median_us, above.median_us))
            leaps_out = point.median_us > OUTLIER_RATIO * near_us[1] or point.median_us * OUTLIER_RATIO < near_us[0]
            if leaps_out and len(point.duration_us) == 1:
                found.append(point)
    return found


def contenders(points: Iterable[GridPoint]) -> list[GridPoint]:
    """Points of one place that may still win: they have one sample, or a sample as fast as the leader's slowest."""
    usable = [point for point in points if _is_ok(point)]
    repeated = _repeated(usable)
    if not repeated:
        return usable
    limit_us = max(min(repeated, key=lambda point: point.median_us).duration_us)
    return [point for point in usable if len(point.duration_us) < 2 or min(point.duration_us) <= limit_us]


def leader(points: Iterable[GridPoint]) -> GridPoint | None:
    """The fastest contender by its own samples, once each contender has two samples; None before."""
    rivals = contenders(points)
    if any(len(point.duration_us) < 2 for point in rivals):
        return None
    return min(rivals, key=lambda point: point.median_us, default=None)


def rough_looks(by_place: dict[Place, list[GridPoint]], roughness_of: dict[Place, float]) -> list[GridPoint]:
    """Each rough place's contender with the fewest samples, if no other place's contender has fewer."""
    found = []
    for place, points in by_place.items():
        rivals = contenders(points)
        if roughness_of[place] > ROUGH_SHARE and len(rivals) > 1:
            found.append(min(rivals, key=lambda point: len(point.duration_us)))
    fewest = min((len(point.duration_us) for point in found), default=0)
    return [point for point in found if len(point.duration_us) == fewest] if fewest < ROUGH_SAMPLES else []


def _repeated(points: Iterable[GridPoint]) -> list[GridPoint]:
    return [point for point in points if len(point.duration_us) > 1]


def _is_ok(point: GridPoint) -> bool:
    return point.outcome is Outcome.ok


def _differ(duration_us: Sequence[float]) -> bool:
    return max(duration_us) > OUTLIER_RATIO * min(duration_us)
