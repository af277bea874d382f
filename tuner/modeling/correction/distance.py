"""Distance of asked settings from measured ones, in octaves of sizes, channels, ranks and nodes.

Durations are smooth over sizes, but not always over channels: a network or a processor may be full at one count and
not at the next. So measurements elsewhere are weaker evidence than a smooth surface would claim.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..features import Floats, channels_filled
from .columns import kind_codes, log2_bytes_per_rank
from .training_set import TrainingSet

NEAR_OCTAVES: Final = 2.25
"""Sizes up to this many octaves from a measurement count as measured; beyond, each octave counts SIZE_WEIGHT."""
SIZE_WEIGHT: Final = 8.0
OTHER_KIND_OCTAVES: Final = 1.0
"""Octaves that a different collective, algorithm or protocol counts as."""


def octaves_to_nearest(asked: TrainingSet, known: TrainingSet) -> Floats:
    """Octaves from each asked point to the nearest of `known`, which has at least one point.

    Channel counts are equal if the requested counts are, or if NCCL runs the same count.
    """
    octaves = np.minimum(
        _gaps(np.log2(asked.n_channels), np.log2(known.n_channels)), _gaps(_log2_filled(asked), _log2_filled(known))
    )
    sizes = _gaps(log2_bytes_per_rank(asked), log2_bytes_per_rank(known))
    octaves += SIZE_WEIGHT * np.maximum(sizes - NEAR_OCTAVES, 0.0)
    octaves += _gaps(np.log2(asked.n_ranks), np.log2(known.n_ranks))
    octaves += _gaps(np.log2(np.maximum(asked.n_nodes, 1)), np.log2(np.maximum(known.n_nodes, 1)))
    octaves += np.where(np.equal.outer(kind_codes(asked), kind_codes(known)), 0.0, OTHER_KIND_OCTAVES)
    nearest: Floats = octaves.min(axis=1)
    return nearest


def _log2_filled(points: TrainingSet) -> Floats:
    filled = channels_filled(points.collective, points.protocol, 2.0**points.log2_bytes, points.n_channels)
    logs: Floats = np.log2(filled)
    return logs


def _gaps(asked: Floats, known: Floats) -> Floats:
    gaps: Floats = np.abs(asked[:, None] - known[None, :])
    return gaps
