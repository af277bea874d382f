"""Turns measurements into points: medians per setting and size, as the log of measured over NCCL's cost."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import numpy.typing as npt

from ....store.records import Algorithm, Candidate, Collective, CommunicatorClass, Outcome, Protocol
from ..cost_prior import CostPrior
from ..features import DEFAULT_CELL, NO_CELL, Floats, Ints, size_classes
from .baked import MOST_CHANNELS

MAX_POINTS: Final = 1500
MIN_NOISE: Final = 0.005
_SEED: Final = 5
ONE_CALL_NOISE: Final = 0.05
"""Noise (log) of a call if no setting was measured twice."""


@dataclass(frozen=True)
class TrainingSet:
    """Points of one fabric, arrays of one length; `residual` is log(median microseconds / cost)."""

    n_ranks: Ints
    n_nodes: Ints
    collective: Ints
    algorithm: Ints
    protocol: Ints
    n_channels: Ints
    """Channels as requested or run; MOST_CHANNELS for NCCL's own choice (cell `DEFAULT_CELL`)."""
    log2_bytes: Floats
    residual: Floats
    noise: Floats
    """Standard error (log) of the median."""
    count: Ints
    jump: Floats
    """How much higher the log of NCCL's cost is because of few nodes (`CostPrior.log_jump`)."""
    idle: Floats
    """How much lower the log of NCCL's cost would be without idle channels (`CostPrior.log_idle`)."""

    def __len__(self) -> int:
        return len(self.residual)

    def take(self, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> TrainingSet:
        """The points at `index`."""
        return TrainingSet(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    @property
    def size_class(self) -> Ints:
        """Size class of every point."""
        return size_classes(np.maximum(np.round(2.0**self.log2_bytes), 1.0).astype(np.uint64))


def training_hash(block: npt.NDArray[np.void]) -> str:
    """A hash that identifies the measurements that a model was fitted on."""
    return hashlib.blake2b(block.tobytes(), digest_size=12).hexdigest()


def build(block: npt.NDArray[np.void], costs: CostPrior) -> TrainingSet:
    """Points from measurements (MEASUREMENT_FIELDS) of one fabric.

    NCCL's own choice counts twice: as the baseline and, if known, as the setting that it chose.
    """
    usable = (block["outcome"] == Outcome.ok) & (block["duration_us"] > 0) & (block["message_bytes"] > 0)
    block = block[usable & (block["n_ranks"] > 1)]
    default = block[block["is_default"] > 0]
    named = block[(block["algorithm"] != NO_CELL) & (block["protocol"] != NO_CELL)]
    points, logs = [], []
    for rows, is_baseline in ((named, False), (default, True)):
        columns = [rows[name].astype(np.int64) for name in _COLUMNS]
        if is_baseline:
            columns[3:6] = [np.full(len(rows), value) for value in (*DEFAULT_CELL, MOST_CHANNELS)]
        columns[5][columns[5] == 0] = MOST_CHANNELS  # NCCL chooses: all that the communicator has
        points.append(np.stack(columns, axis=1))
        logs.append(np.log(rows["duration_us"].astype(np.float64)))
    return _medians(np.concatenate(points), np.concatenate(logs), costs)


_COLUMNS: Final = (
    "n_ranks",
    "n_nodes",
    "collective",
    "algorithm",
    "protocol",
    "n_channels",
    "message_bytes",
)


def _medians(table: Ints, logs: Floats, costs: CostPrior) -> TrainingSet:
    """One point per distinct row of `table` (the columns of `_COLUMNS`)."""
    if not len(logs):
        none, nothing = np.zeros(0, np.int64), np.zeros(0)
        return TrainingSet(none, none, none, none, none, none, nothing, nothing, nothing, none, nothing, nothing)
    order = np.lexsort((logs, *table.T[::-1]))
    table, logs = table[order], logs[order]
    starts = np.flatnonzero(np.r_[True, np.any(table[1:] != table[:-1], axis=1)])
    counts = np.diff(np.r_[starts, len(table)]).astype(np.int64)
    medians = 0.5 * (logs[starts + (counts - 1) // 2] + logs[starts + counts // 2])
    quartiles = logs[starts + (3 * counts) // 4] - logs[starts + counts // 4]
    spread = _call_noise(logs, starts, counts, quartiles / 1.349)
    noise = np.maximum(1.25 * spread / np.sqrt(counts), MIN_NOISE)
    points = table[starts]
    # Keep the best measured points; among equals a random sample, since points are ordered by rank count and setting.
    mixed = np.random.default_rng(_SEED).permutation(len(points))
    kept = np.sort(np.lexsort((mixed, -counts))[:MAX_POINTS])
    cost, jump, idle = predicted = np.full((3, len(points)), np.nan)
    predicted[:, kept] = _predicted(points[kept], costs)
    kept = np.flatnonzero(np.isfinite(cost))
    n_ranks, n_nodes, collective, algorithm, protocol, n_channels, message_bytes = points[kept].T
    return TrainingSet(
        n_ranks,
        n_nodes,
        collective,
        algorithm,
        protocol,
        n_channels,
        np.log2(message_bytes.astype(np.float64)),
        medians[kept] - cost[kept],
        noise[kept],
        counts[kept],
        jump[kept],
        idle[kept],
    )


def _call_noise(logs: Floats, starts: Ints, counts: Ints, own: Floats) -> Floats:
    """Noise (log) of single calls at every point: its own, shrunk towards that of all points if it has few calls.

    `own` is a point's noise by its quartiles, so that stragglers do not count as noise; `logs` are sorted within
    each point.
    """
    gaps = np.repeat(logs[starts + counts // 2], counts) - logs
    repeated = np.repeat(counts > 1, counts)
    typical = 1.4826 * float(np.median(np.abs(gaps[repeated]))) if repeated.any() else 0.0
    # With few calls the median is one of them, which hides some of the noise.
    n_typical = float(np.median(counts[counts > 1])) if (counts > 1).any() else 1.0
    typical *= math.sqrt(n_typical / max(n_typical - 1.0, 0.5)) if n_typical > 1 else 1.0
    n_seen = float(repeated.sum())
    pooled = (4.0 * ONE_CALL_NOISE**2 + n_seen * typical**2) / (4.0 + n_seen)
    weight = np.where(counts >= 4, counts, 0)
    shrunk: Floats = np.sqrt((8.0 * pooled + weight * own**2) / (8.0 + weight))
    return shrunk


def _predicted(points: Ints, costs: CostPrior) -> Floats:
    """NCCL's log cost of every point, its jump and its idle channels; NaN if NCCL does not offer the setting."""
    found = np.full((3, len(points)), np.nan)
    families, inverse = np.unique(points[:, :6], axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    for at, (n_ranks, n_nodes, collective, algorithm, protocol, n_channels) in enumerate(families.tolist()):
        rows = inverse == at
        candidate = candidate_at(algorithm, protocol, n_channels)
        if candidate is None or collective not in _COLLECTIVES:
            continue
        asked = CommunicatorClass(n_ranks, max(1, n_nodes)), Collective(collective), (candidate,), points[rows, 6]
        for row, lookup in enumerate((costs.log_cost, costs.log_jump, costs.log_idle)):
            found[row, rows] = lookup(*asked)[:, 0]
    return found


def candidate_at(algorithm: int, protocol: int, n_channels: int) -> Candidate | None:
    """The candidate of NCCL's numbers; the baseline for `DEFAULT_CELL`, None for values that NCCL does not have.

    Algorithm and protocol may be `NO_CELL`. Channels are 0 to 64; 0: NCCL chooses.
    """
    if (algorithm, protocol) == DEFAULT_CELL:
        return Candidate()
    if algorithm not in _ALGORITHMS or protocol not in _PROTOCOLS or not 0 <= n_channels <= 64:
        return None
    return Candidate(Algorithm(algorithm), Protocol(protocol), n_channels)


_COLLECTIVES: Final = frozenset(int(member) for member in Collective)
_ALGORITHMS: Final = frozenset(int(member) for member in Algorithm)
_PROTOCOLS: Final = frozenset(int(member) for member in Protocol)
