"""Summarises measurements, so that users see a wrong number of nodes or unit of time before recording."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...store.records import Collective

_SHAPE: Final = ["collective", "n_ranks", "n_nodes"]
MAX_EXTENTS: Final = 1000
"""Most extents that are kept, so that a hostile file cannot fill memory."""


class Extent(NamedTuple):
    """The measurements of one collective on one number of ranks and nodes."""

    collective: str
    n_ranks: int
    n_nodes: int
    n_measurements: int
    min_bytes: int
    max_bytes: int
    min_us: float
    max_us: float


def extents(rows: NDArray[np.void]) -> list[Extent]:
    """One extent for each collective and shape of MEASUREMENT rows, shape (n,)."""
    if not len(rows):
        return []
    shapes, picks, counts = np.unique(rows[_SHAPE], return_inverse=True, return_counts=True)
    ordered, begins = rows[np.argsort(picks)], np.cumsum(counts) - counts
    bounds = [
        end.reduceat(ordered[name], begins).tolist()
        for name in ("message_bytes", "duration_us")
        for end in (np.minimum, np.maximum)
    ]
    return [
        Extent(Collective(collective).name, n_ranks, n_nodes, count, *edges)
        for (collective, n_ranks, n_nodes), count, *edges in zip(shapes.tolist(), counts.tolist(), *bounds, strict=True)
    ]


def together(parts: Iterable[Extent]) -> list[Extent]:
    """Merged extents of all parts, most measurements first; MAX_EXTENTS at most."""
    found: dict[tuple[str, int, int], list[Extent]] = defaultdict(list)
    for part in parts:
        found[part.collective, part.n_ranks, part.n_nodes].append(part)
    whole = (
        Extent(
            *place,
            sum(part.n_measurements for part in same),
            min(part.min_bytes for part in same),
            max(part.max_bytes for part in same),
            min(part.min_us for part in same),
            max(part.max_us for part in same),
        )
        for place, same in found.items()
    )
    return sorted(whole, key=lambda extent: -extent.n_measurements)[:MAX_EXTENTS]
