"""Points as the columns that models read, and their kinds (collective, algorithm, protocol)."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..features import Floats, Ints
from .training_set import TrainingSet

Kind = tuple[int, int, int]
SEED: Final = 7


def numeric(points: TrainingSet) -> Floats:
    """log2 of bytes per rank, channels, ranks, nodes: shape [n, 4]."""
    nodes = np.log2(np.maximum(points.n_nodes, 1))
    return np.column_stack([log2_bytes_per_rank(points), np.log2(points.n_channels), np.log2(points.n_ranks), nodes])


def log2_bytes_per_rank(points: TrainingSet) -> Floats:
    """log2 of the bytes per rank."""
    logs: Floats = points.log2_bytes - np.log2(points.n_ranks)
    return logs


def communicator_codes(points: TrainingSet) -> Ints:
    """A number for the communicator of every point."""
    codes: Ints = points.n_ranks << 20 | np.maximum(points.n_nodes, 1)
    return codes


def kind_codes(points: TrainingSet) -> Ints:
    """A number for the kind of every point."""
    codes: Ints = points.collective << 16 | points.algorithm << 8 | points.protocol
    return codes


def kinds_of(points: TrainingSet) -> list[Kind]:
    """Every kind among the points, in order."""
    table = np.stack([points.collective, points.algorithm, points.protocol], axis=1)
    return [(int(a), int(b), int(c)) for a, b, c in np.unique(table, axis=0)]


def one_hot(points: TrainingSet, kinds: list[Kind]) -> Floats:
    """Flags for collective, algorithm, protocol and the whole kind, so that related kinds are close."""
    columns = [
        points.collective[:, None] == np.unique([kind[0] for kind in kinds])[None, :],
        points.algorithm[:, None] == np.unique([kind[1] for kind in kinds])[None, :],
        points.protocol[:, None] == np.unique([kind[2] for kind in kinds])[None, :],
    ]
    return np.concatenate(columns, axis=1).astype(np.float64)
