"""Medians of measurements in the trace and in the store, with their standard errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ....store.records import BASELINE, Candidate, CandidateStatistics, DecisionKey
from ....store.sqlite.rows.measurements import candidate_of
from .table import UNKNOWN, CollectiveTable, Shape, numbered

Array = NDArray[Any]

NORMAL_95: Final = 1.96
MEDIAN_OVER_MEAN_ERROR: Final = 1.2533
"""Standard error of a normal sample's median over that of its mean, sqrt(pi/2)."""
LEAST_NOISE: Final = 0.02
"""Relative spread assumed if too few samples show their own."""
UNSHOWN_NOISE: Final = 0.04
"""Relative spread assumed for sweeps whose settings all have too few samples."""
MAD_TO_SIGMA: Final = 1.4826
SAMPLES_THAT_SHOW_SPREAD: Final = 5


class Grade(IntEnum):
    """Origin of an estimate, best first."""

    measured_here = 0
    measured_elsewhere = 1
    predicted = 2


@dataclass(frozen=True)
class Estimate:
    """Cost of one collective: `cost_us` with the standard error `error` relative to it."""

    cost_us: float
    error: float
    grade: Grade
    n_samples: int = 0

    @property
    def low_us(self) -> float:
        """Lower end of the 95 % interval (log-normal)."""
        return self.cost_us * math.exp(-NORMAL_95 * self.error)

    @property
    def high_us(self) -> float:
        """Upper end of the 95 % interval (log-normal)."""
        return self.cost_us * math.exp(NORMAL_95 * self.error)


_Median = tuple[float, float, int]
"""(median, relative sigma of a normal distribution from the median absolute deviation, count)."""


def measured_elsewhere(statistics: Iterable[CandidateStatistics]) -> dict[DecisionKey, dict[Candidate, Estimate]]:
    """Estimates by key; NCCL's own choices count for the baseline and for the setting that ran."""
    found: dict[DecisionKey, dict[Candidate, Estimate]] = {}
    usable = [one for one in statistics if one.count >= 1 and one.median_us > 0]
    spreads = [one.std_us / one.mean_us if one.mean_us > 0 else 0.0 for one in usable]
    medians = [(one.median_us, spread, one.count) for one, spread in zip(usable, spreads, strict=True)]
    for one, estimate in zip(usable, _estimates(medians, Grade.measured_elsewhere, UNSHOWN_NOISE), strict=True):
        known = found.setdefault(one.key, {})
        for candidate in {one.candidate, BASELINE} if one.is_default else {one.candidate}:
            if candidate not in known or known[candidate].n_samples < one.count:
                known[candidate] = estimate
    return found


def _estimates(medians: Sequence[_Median], grade: Grade, unshown: float) -> list[Estimate]:
    """Estimates with standard errors; few samples get at least the others' typical spread, or else `unshown`."""
    shown = [spread for _, spread, count in medians if count >= SAMPLES_THAT_SHOW_SPREAD]
    typical = float(np.median(shown)) if shown else unshown
    found = []
    for median_us, spread, count in medians:
        own = spread if count >= SAMPLES_THAT_SHOW_SPREAD else max(typical, spread)
        error = MEDIAN_OVER_MEAN_ERROR * max(own, LEAST_NOISE) / math.sqrt(count)
        found.append(Estimate(median_us, error, grade, count))
    return found


def measured_here(table: CollectiveTable) -> dict[tuple[Shape, Candidate], Estimate]:
    """Medians of the trace's own timed rows by shape and setting, and of NCCL's own choice as baseline."""
    shapes, shape_index = table.shapes
    samples: dict[tuple[Shape, Candidate], list[Array]] = {}
    for at, is_default, candidate, duration_us in _groups(table, shape_index):
        if candidate is not None:
            samples.setdefault((shapes[at], candidate), []).append(duration_us)
        if is_default:
            samples.setdefault((shapes[at], BASELINE), []).append(duration_us)
    medians = [_median_and_spread(np.concatenate(parts)) for parts in samples.values()]
    return dict(zip(samples, _estimates(medians, Grade.measured_here, LEAST_NOISE), strict=True))


def _groups(table: CollectiveTable, shape_index: Array) -> Iterator[tuple[int, bool, Candidate | None, Array]]:
    """Groups of timed rows: (shape's index, chosen by NCCL, setting, durations)."""
    rows, duration_us = table.rows, table.duration_us
    code = shape_index << 25 | table.is_default.astype(np.int64) << 24
    for column, shift in (("algorithm", 16), ("protocol", 8), ("n_channels", 0)):
        code |= rows[column].astype(np.int64) << shift
    timed = duration_us > 0
    if not bool(timed.all()):
        code, duration_us = code[timed], duration_us[timed]
    if not len(code):
        return
    codes, group = numbered(code)
    counts = np.bincount(group)
    small = group.astype(np.uint16 if len(codes) < 1 << 16 else np.int64)  # numpy sorts 16 bits by radix
    duration_us = duration_us[np.argsort(small, kind="stable")]
    ends = np.cumsum(counts)
    for one, end, count in zip(codes.tolist(), ends.tolist(), counts.tolist(), strict=True):
        candidate = _candidate(one >> 16 & 255, one >> 8 & 255, one & 255)
        yield one >> 25, bool(one >> 24 & 1), candidate, duration_us[end - count : end]


def _candidate(algorithm: int, protocol: int, n_channels: int) -> Candidate | None:
    if algorithm == UNKNOWN or n_channels > 64:
        return None
    return candidate_of(algorithm, protocol, n_channels)


def error_of_median(values: Array) -> float:
    """Relative standard error of the median of `values`, which are enough to show their spread."""
    _, spread, count = _median_and_spread(values)
    return MEDIAN_OVER_MEAN_ERROR * spread / math.sqrt(count)


def _median_and_spread(duration_us: Array) -> _Median:
    median_us = float(np.median(duration_us))
    deviation_us = float(np.median(np.abs(duration_us - median_us)))
    return median_us, MAD_TO_SIGMA * deviation_us / median_us, len(duration_us)
