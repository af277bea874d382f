"""Measured collectives and steps."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from .keys import DecisionKey, Phase
from .nccl import Algorithm, Candidate, Collective, Protocol
from .numbers import Micros, Ordinal, Pressure


class TimingSource(IntEnum):
    """The origin of a duration; `none` means that there is no duration."""

    none = 0
    gpu_kernel = 1
    """GPU timestamps of the kernel's channels (profiler ABI v4 and newer)."""
    cpu_kernel = 2
    """CPU timestamps of the kernel-channel events (profiler ABI v3)."""
    cpu_collective = 3
    """CPU time between the collective's start and stop events: enqueue only, least trusted."""
    emulated = 4
    """The emulated NCCL's virtual clock."""
    reported = 5
    """Stated by an imported file."""


class Source(IntEnum):
    """The origin of a measurement."""

    live = 0
    sweep = 1
    imported = 2


class Outcome(IntEnum):
    """How a measured collective ended."""

    ok = 0
    failed = 1
    hung = 2
    outlier = 3


LEAST_US: Final = 0.01
"""No collective is shorter: a smaller reported duration was not measured."""


class Observation(msgspec.Struct, frozen=True):
    """One collective on one rank, as traces and importers give it; None means unknown."""

    sequence: int
    collective: Collective
    message_bytes: int
    n_ranks: int
    rank: int = 0
    comm_id: int = 0
    n_nodes: int | None = None
    phase: Phase = Phase.other
    datatype: str | None = None
    algorithm: Algorithm | None = None
    protocol: Protocol | None = None
    n_channels: int | None = None
    start_ns: int | None = None
    duration_us: float | None = None
    timing_source: TimingSource = TimingSource.none
    memory_pressure: float | None = None
    epoch: int = 0
    step: int | None = None


class StepRecord(msgspec.Struct, frozen=True):
    """One training step on one rank.

    `duration_us` comes from the training clock: wall time, or the emulated NCCL's virtual clock.
    `exposed_us` is communication that computation had to wait for; None if unknown. `is_whole` is False if the step
    must not be compared with others: plans changed within it, nothing has been exchanged yet, or it is only an interval
    of a job whose steps are unknown.
    """

    step: Ordinal
    epoch: Ordinal
    duration_us: Micros
    exposed_us: Micros | None = None
    memory_pressure: Pressure | None = None
    is_whole: bool = True


class CandidateStatistics(msgspec.Struct, frozen=True):
    """The store's statistics of one candidate under one key; only successful calls count."""

    key: DecisionKey
    candidate: Candidate
    is_default: bool
    """True when NCCL chose this setting by itself."""
    count: int
    median_us: float
    mean_us: float
    std_us: float
    min_us: float
    last_seen_s: float
    level_std: float = 0.0
    """Standard error (log) of its comparison with NCCL's own choice, as far as the two ran at different times."""
