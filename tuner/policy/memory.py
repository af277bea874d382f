"""What device memory allows: the one place where choice asks about memory.

Connecting an algorithm that has not run yet on a communicator costs device memory (`agent.nccl.memory`), and
with some libraries so does every channel. Nothing is connected that would bring the pressure above a
threshold, and above it no channels are added either; what the pressure did last says whether larger messages
are to be expected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from agent.nccl import memory as nccl_memory
from store.records import Algorithm, Candidate, CommunicatorClass

RELEASE: Final = 0.02
"""Memory counts as short until the pressure is so far below the threshold: no flapping at its edge."""
DROP: Final = 0.1
"""Fall of the pressure below its recent peak after which larger messages are expected."""


class MemoryGate:
    """Told what runs and how full the device is; asked before anything new is tried."""

    def __init__(self, threshold: float, fabric: Mapping[str, str | int | float | bool] | None = None) -> None:
        facts = fabric or {}
        self._threshold = threshold
        self._device_mb = _number(facts.get("device_mb"))
        self._channel_mb = _number(facts.get("channel_mb"))
        self._pressure = 0.0
        self._peak = 0.0
        self._connected: dict[CommunicatorClass, dict[Algorithm, int]] = {}
        self._heard: set[int] = set()
        self.is_short = False
        """Whether nothing new may be connected."""
        self.is_falling = False
        """Whether memory became free since it was last short, or since the pressure's last peak."""

    @property
    def pressure(self) -> float:
        """Device memory in use, 0 to 1, as last heard."""
        return self._pressure

    @pressure.setter
    def pressure(self, pressure: float) -> None:
        self._pressure = pressure
        was_short = self.is_short
        if pressure > self._threshold:
            self.is_short = True
        elif pressure < self._threshold - RELEASE:
            self.is_short = False
        if self.is_short or pressure >= self._peak:
            self._peak, self.is_falling = max(pressure, self._peak), self.is_falling and not self.is_short
        if not self.is_short and (was_short or pressure < self._peak - DROP):
            self._peak, self.is_falling = pressure, True

    def ran(self, block: npt.NDArray[np.void]) -> None:
        """These measurements (MEASUREMENT_FIELDS) show what is connected, with how many channels."""
        codes = block["n_ranks"].astype(np.int64) << 40 | block["n_nodes"].astype(np.int64) << 16
        codes |= block["algorithm"].astype(np.int64) << 8
        codes |= block["n_channels"]
        for code in set(np.unique(codes).tolist()) - self._heard:
            self._heard.add(code)
            communicator = CommunicatorClass(code >> 40, code >> 16 & 0xFFFFFF)
            if code >> 8 & 0xFF in _ALGORITHMS:
                own, algorithm = self._connected.setdefault(communicator, {}), Algorithm(code >> 8 & 0xFF)
                own[algorithm] = max(own.get(algorithm, 0), code & 0xFF)

    def connected(self) -> Iterator[tuple[CommunicatorClass, Mapping[Algorithm, int]]]:
        """What has run on each kind of communicator, with the most channels."""
        yield from self._connected.items()

    def has_room_for(self, candidate: Candidate, communicator: CommunicatorClass) -> bool:
        """Whether `candidate` needs nothing but what is connected already."""
        if candidate.algorithm is None:
            return False
        n_channels = self._connected.get(communicator, {}).get(candidate.algorithm, 0)
        return 0 < candidate.n_channels <= n_channels

    def allows(self, candidate: Candidate, n_channels_now: int, communicator: CommunicatorClass) -> bool:
        """Whether `candidate` may run where `n_channels_now` channels run now (0 = unknown)."""
        algorithm, own = candidate.algorithm, self._connected.get(communicator, {})
        if algorithm is not None and algorithm not in own and not self._may_connect(algorithm, communicator, own):
            return False
        return not self.is_short or not n_channels_now or 0 < candidate.n_channels <= n_channels_now

    def _may_connect(self, algorithm: Algorithm, communicator: CommunicatorClass, own: Mapping[Algorithm, int]) -> bool:
        return not self.is_short and self._pressure + self._share(algorithm, communicator, own) <= self._threshold

    def _share(self, algorithm: Algorithm, communicator: CommunicatorClass, own: Mapping[Algorithm, int]) -> float:
        """Part of the device's memory that connecting an algorithm would take; 0 where its memory is not known."""
        if self._device_mb <= 0:
            return 0.0
        n_channels = max(own.values(), default=_USUAL_CHANNELS)
        if self._channel_mb > 0:
            taken_mb = n_channels * self._channel_mb * nccl_memory.n_neighbours(algorithm, communicator)
        else:
            taken_mb = nccl_memory.connection_mb(algorithm, communicator, n_channels)
        return taken_mb / self._device_mb


def _number(fact: str | int | float | bool | None) -> float:
    return float(fact) if isinstance(fact, int | float) else 0.0


_USUAL_CHANNELS: Final = 16
_ALGORITHMS: Final = frozenset(int(member) for member in Algorithm)
