"""How far asked channel counts are from those that were measured.

Over sizes durations are smooth, over channels they need not be: a network or a processor is full at one count and
not at the next. So measurements at other counts say less than a smooth surface would claim.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from zerotune.tuner.modeling.correction.columns import Bools, log2_bytes_per_rank
from zerotune.tuner.modeling.correction.training_set import TrainingSet
from zerotune.tuner.modeling.features import NO_CELL, Floats, channels_filled

NEAR_BYTES: Final = 2.25
"""A measurement of a channel count stands for sizes up to this many octaves away."""


def octaves_to_measured(asked: TrainingSet, known: TrainingSet) -> Floats:
    """Octaves from each asked channel count to the nearest one of `known` at about the same size; infinite without any.

    Counts are equal if the same was asked for, or if NCCL runs the same.
    """
    if not len(known):
        return np.full(len(asked), np.inf)
    gaps = np.minimum(
        _gaps(np.log2(asked.n_channels), np.log2(known.n_channels)), _gaps(_log2_filled(asked), _log2_filled(known))
    )
    is_near = _gaps(log2_bytes_per_rank(asked), log2_bytes_per_rank(known)) <= NEAR_BYTES
    nearest: Floats = np.where(is_near, gaps, np.inf).min(axis=1)
    return nearest


def runs_as_asked(points: TrainingSet) -> Bools:
    """Which points ran with as many channels as they asked for; those of NCCL's own choice asked for none."""
    is_full: Bools = _log2_filled(points) >= np.log2(points.n_channels) - 1e-9
    named: Bools = points.algorithm != NO_CELL
    return np.logical_and(is_full, named)


def _log2_filled(points: TrainingSet) -> Floats:
    filled = channels_filled(points.collective, points.protocol, 2.0**points.log2_bytes, points.n_channels)
    logs: Floats = np.log2(filled)
    return logs


def _gaps(asked: Floats, known: Floats) -> Floats:
    gaps: Floats = np.abs(asked[:, None] - known[None, :])
    return gaps
