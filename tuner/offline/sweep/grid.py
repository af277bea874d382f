"""The grid points of a sweep: a candidate at one (collective, size), with its samples and their precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....agent.nccl import catalog
from ....agent.nccl.cost_model import in_effect
from ....store.records import BASELINE, Candidate, Collective, CommunicatorClass, Outcome
from ....store.sqlite.rows.measurements import candidate_of
from .protocol import whole_bytes

Array = NDArray[Any]

CONFIDENCE: Final = 0.95
MIN_REPEATS: Final = 6
"""Six samples are the fewest whose extremes bracket the median with 95 % confidence."""
OUTLIER_DEVIATIONS: Final = 6.0
OUTLIER_SHARE: Final = 0.1
_MAD_TO_SIGMA: Final = 1.4826


@dataclass(frozen=True, order=True)
class Place:
    """A collective at one size, at which settings compete."""

    collective: Collective
    message_bytes: int


@dataclass
class GridPoint:
    """One candidate at one place. `duration_us` holds all samples, outliers too."""

    place: Place
    candidate: Candidate
    duration_us: list[float] = field(default_factory=list)
    outcome: Outcome = Outcome.ok
    reason: str = ""
    ran: Candidate | None = None
    """The setting that NCCL chose, if the candidate is the baseline."""
    is_left_out: bool = False
    """Never tried, since it or its kind keeps failing at other sizes (zerotune.tuner.offline.sweep.broken)."""
    n_full_samples: int = 0
    """How many of the samples an earlier full sweep took."""

    @property
    def median_us(self) -> float:
        """Median of the samples; NaN without any."""
        return median(self.duration_us) if self.duration_us else math.nan

    @property
    def relative_half_width(self) -> float:
        """Half the 95 % interval of the median, as a share of the median; infinite below 6 samples."""
        low_us, high_us = self.interval_us
        return (high_us - low_us) / 2 / self.median_us if math.isfinite(high_us) else math.inf

    @property
    def interval_us(self) -> tuple[float, float]:
        """The 95 % interval of the median by order statistics: no assumption about the noise."""
        n_below = samples_below(len(self.duration_us))
        if n_below is None:
            return 0.0, math.inf
        ordered = sorted(self.duration_us)
        return ordered[n_below], ordered[-1 - n_below]

    @property
    def is_seen(self) -> bool:
        """Whether the point was tried: it has samples, or failed."""
        return bool(self.duration_us) or (self.outcome is not Outcome.ok and not self.is_left_out)

    def is_done(self, precision: float, max_repeats: int) -> bool:
        """Whether the point needs no more samples: it is precise enough, at the cap, or broken."""
        if self.outcome is not Outcome.ok:
            return True
        return len(self.duration_us) >= max_repeats or self.relative_half_width <= precision

    def outliers(self, fresh_us: Sequence[float]) -> list[bool]:
        """Which of `fresh_us` lie far from all samples so far, these included."""
        known = np.array([*self.duration_us, *fresh_us])
        centre = float(np.median(known))
        spread = _MAD_TO_SIGMA * float(np.median(np.abs(known - centre)))
        limit_us = max(OUTLIER_DEVIATIONS * spread, OUTLIER_SHARE * centre)
        return [abs(one - centre) > limit_us for one in fresh_us]


@lru_cache(maxsize=1024)
def samples_below(n_samples: int) -> int | None:
    """Index of the order statistic that bounds the median's 95 % interval from below; None: too few.

    The k-th smallest and k-th largest of n bracket the median with probability 1 - 2 P(B < k), B binomial
    (n, 1/2); the index is k - 1.
    """
    from scipy.special import bdtr  # takes 0.2 s to load

    fitting = 2 * bdtr(np.arange(n_samples // 2), n_samples, 0.5) <= 1 - CONFIDENCE
    return int(fitting.sum()) - 1 if fitting.any() else None


def message_sizes(min_bytes: int, max_bytes: int, n_ranks: int) -> list[int]:
    """Total bytes of a sweep's messages, rising: `min_bytes` and its doublings, as whole floats on every rank.

    Rounding up may exceed `max_bytes`.
    """
    sizes = []
    size_bytes = min_bytes
    while size_bytes <= max_bytes:
        sizes.append(whole_bytes(size_bytes, n_ranks))
        size_bytes *= 2
    return list(dict.fromkeys(sizes))


def make_grid(
    collectives: Iterable[Collective],
    sizes_bytes: Sequence[int],
    communicator: CommunicatorClass,
    max_channels: int,
    offered: dict[str, tuple[tuple[int, int], ...]],
    chunk_sizes: Sequence[int] = (),
) -> list[GridPoint]:
    """Every point of the grid, by collective and size: at each place the baseline, then each setting once.

    Channel counts that have the same effect, as for little traffic, are one point.

    Args:
        offered: (algorithm, protocol) that NCCL offers, by the collective's name.
        chunk_sizes: in bytes; each setting with a chunk size is tried with NCCL's own and with each of these.
    """
    points = []
    for collective in collectives:
        legal = catalog.legal_cells(
            collective, n_nodes=communicator.n_nodes, n_ranks=communicator.n_ranks, collnet=True
        )
        usable = [pair for pair in legal if (int(pair[0]), int(pair[1])) in offered.get(collective.name, ())]
        candidates = catalog.candidates(collective, communicator, max_channels, cells=usable)
        for message_bytes in sizes_bytes:
            seen = set()
            for candidate in candidates:
                effective = in_effect(collective, message_bytes, candidate)
                if effective not in seen:
                    seen.add(effective)
                    sizes = chunk_sizes if effective.algorithm in catalog.TAKES_CHUNK_SIZE else ()
                    for chunk_bytes in (0, *sizes):
                        setting = msgspec.structs.replace(effective, chunk_bytes=chunk_bytes)
                        points.append(GridPoint(Place(collective, message_bytes), setting))
    return points


def restore(points: Iterable[GridPoint], measurements: Array) -> int:
    """Put the measurements of earlier sweeps (MEASUREMENT, shape (n,)) into `points`; returns how many were used.

    Rows are as they were stored: those of one visit are neighbours and have one epoch. A visit with several samples was
    a full sweep's.
    """
    by_key = {(point.place, point.candidate): point for point in points}
    n_restored = 0
    visits: list[tuple[GridPoint, int]] = []
    for row in measurements:
        place = Place(Collective(int(row["collective"])), int(row["message_bytes"]))
        ran = candidate_of(*(row[name].item() for name in ("algorithm", "protocol", "n_channels", "chunk_bytes")))
        candidate = BASELINE if row["is_default"] or ran.algorithm is None else ran
        point = by_key.get((place, candidate))
        if point is None:
            continue
        outcome = Outcome(int(row["outcome"]))
        if outcome in (Outcome.failed, Outcome.hung):
            point.outcome, point.reason = outcome, "recorded by an earlier sweep"
        else:
            point.duration_us.append(float(row["duration_us"]))
            n_restored += 1
            visits.append((point, int(row["epoch"])))
            if candidate == BASELINE and ran.algorithm is not None:
                point.ran = ran
    for _, visit in itertools.groupby(visits, key=lambda sample: (id(sample[0]), sample[1])):
        sampled = [point for point, _ in visit]
        if len(sampled) > 1:
            sampled[0].n_full_samples += len(sampled)
    return n_restored
