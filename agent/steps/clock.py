"""The training clock: what a step's duration and exposed communication are read off.

Wall time with the real NCCL; the virtual clock with the emulated one, so that emulated figures are
the same on any machine.
"""

from __future__ import annotations

import time
from typing import Protocol


class TrainingClock(Protocol):
    """Monotonic time of this rank's training, in microseconds."""

    def now_us(self) -> float:
        """Time now."""

    def exposed_us(self) -> float | None:
        """Communication that computation had to wait for, cumulated; None where unknown."""


class WallClock:
    """The machine's monotonic clock; it cannot tell exposed communication."""

    def now_us(self) -> float:
        """Monotonic wall time."""
        return time.perf_counter_ns() / 1000

    def exposed_us(self) -> float | None:
        """Unknown."""
        return None


def training_clock(emulated: bool) -> TrainingClock:
    """The virtual clock when the collectives are emulated, else wall time."""
    if emulated:
        from zerotune.agent.nccl.emulated.device import clock

        return clock
    return WallClock()
