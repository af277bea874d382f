"""How close a job came to the best setting of its fabric, by what the daemon measured last."""

from __future__ import annotations

import sqlite3
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Final

from zerotune.agent.nccl.fabric import load
from zerotune.agent.nccl.fabric_model import Fabric
from zerotune.store.errors import FabricError
from zerotune.store.records import Algorithm, Collective, CommunicatorClass, Protocol

_LAST: Final = 0.1
"""Share of the job's steps that counts."""
_LEAST_BYTES: Final = 64 << 10
"""Smaller collectives are decided by their latency."""


def time_over_best(store: Path, fabric_name: str) -> float:
    """Time of the large collectives of the last steps, over that of the best setting for each."""
    fabric = load(fabric_name)
    with sqlite3.connect(store) as connection:
        (last,) = connection.execute("select max(step) from measurements").fetchone()
        rows = connection.execute(
            "select n_ranks, n_nodes, collective, message_bytes, duration_us from measurements"
            " join series on series.id = measurements.series where step > ? and message_bytes >= ?",
            ((1 - _LAST) * last, _LEAST_BYTES),
        ).fetchall()
    durations: dict[tuple[int, int, int, int], list[float]] = defaultdict(list)
    for *which, duration_us in rows:
        durations[tuple(which)].append(duration_us)
    taken_us = best_us = 0.0
    for (n_ranks, n_nodes, collective, message_bytes), times_us in durations.items():
        taken_us += len(times_us) * statistics.median(times_us)
        communicator = CommunicatorClass(n_ranks, n_nodes)
        best_us += len(times_us) * _best_us(fabric, communicator, Collective(collective), message_bytes)
    return taken_us / best_us


def _best_us(fabric: Fabric, communicator: CommunicatorClass, collective: Collective, message_bytes: int) -> float:
    times_us = []
    for algorithm in Algorithm:
        for protocol in Protocol:
            for n_channels in range(1, fabric.max_channels(communicator) + 1):
                try:
                    times_us.append(
                        fabric.truth_us(communicator, collective, algorithm, protocol, n_channels, message_bytes)
                    )
                except FabricError:
                    break
    return min(times_us)
