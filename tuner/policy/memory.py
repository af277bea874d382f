"""What device memory allows: the one place where choice asks about memory.

Connecting an algorithm that has not run yet costs device memory, and so does every channel. Above a
threshold of memory pressure nothing new is connected and no channels are added.
"""

from __future__ import annotations

from collections.abc import Iterable

from store.records import Candidate


class MemoryGate:
    """Told what runs and how full the device is; asked before anything new is tried."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self.pressure = 0.0
        self._connected: set[int] = set()

    def ran(self, algorithms: Iterable[int]) -> None:
        """These algorithms have run in this job: they are connected."""
        self._connected.update(algorithms)

    def allows(self, candidate: Candidate, n_channels_now: int) -> bool:
        """Whether `candidate` may run where `n_channels_now` channels run now (0 = unknown)."""
        if self.pressure <= self._threshold:
            return True
        if candidate.algorithm is not None and int(candidate.algorithm) not in self._connected:
            return False
        return not n_channels_now or 0 < candidate.n_channels <= n_channels_now
