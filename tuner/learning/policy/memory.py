"""What device memory allows: the one place where choice asks about memory.

Connecting an algorithm that has not run yet on a communicator costs device memory (`zerotune.agent.nccl.memory`), and
with some libraries so does every channel. Nothing is connected that would bring the pressure above a
threshold. Above it only what has run already may run, with as many channels or fewer: that takes no memory of either
kind of library, and nothing is given back by using less of it. What the pressure did last says whether larger
messages are to be expected.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from zerotune.agent.nccl import memory
from zerotune.store.records import Algorithm, Candidate, CommunicatorClass

RELEASE: Final = 0.02
"""Memory counts as short until the pressure is so far below the threshold: no flapping at its edge."""
PROMISE_READINGS: Final = 100
"""What was to be connected and has not run for this many readings of the pressure is not waited for."""
MORE_CHANNELS_GAIN: Final = 0.01
"""What more channels than now must gain (log) beyond what any change must, while memory is short."""
N_READINGS: Final = 256
"""Calls are told later than steps."""
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
        self._fuller = 0.0
        """By how much another rank's device was fuller than rank 0's, whose steps are told, when last seen."""
        self._fullest = -1, 0.0
        """The fullest device of all ranks, as their calls tell it, and the step of that."""
        self._readings: deque[tuple[int, float]] = deque(maxlen=N_READINGS)
        self._peak = 0.0
        self._connected: dict[CommunicatorClass, dict[Algorithm, int]] = {}
        self._heard: set[int] = set()
        self._promised: dict[tuple[CommunicatorClass, Algorithm], tuple[float, int]] = {}
        """What is to be connected soon: the share of memory that it takes, and the reading by which it has run."""
        self._n_readings = 0
        self.is_short = False
        """Whether nothing new may be connected."""
        self.is_falling = False
        """Whether memory became free since it was last short, or since the pressure's last peak."""

    @property
    def pressure(self) -> float:
        """Device memory in use, 0 to 1, on the rank with the fullest device, as last heard."""
        return min(1.0, self._pressure + self._fuller)

    def heard(self, pressure: float, step: int) -> None:
        """Rank 0's device was so full at the end of `step`."""
        self._pressure = pressure
        self._readings.append((step, pressure))
        self._n_readings += 1
        fullest_step, fullest = self._fullest
        then = next((reading for at, reading in reversed(self._readings) if at <= fullest_step), math.inf)
        self._fuller = max(0.0, fullest - then)
        pressure, was_short = self.pressure, self.is_short
        if pressure > self._threshold:
            self.is_short = True
        elif pressure < self._threshold - RELEASE:
            self.is_short = False
        if self.is_short or pressure >= self._peak:
            self._peak, self.is_falling = max(pressure, self._peak), self.is_falling and not self.is_short
        if not self.is_short and (was_short or pressure < self._peak - DROP):
            self._peak, self.is_falling = pressure, True

    def ran(self, block: npt.NDArray[np.void]) -> list[int]:
        """Learn from measurements (MEASUREMENT_FIELDS) what is connected and how full the fullest device is.

        Returns the indices of those that connected something. One communicator of each kind is known. More channels of
        what has run connect nothing in NCCL.
        """
        step = int(block["step"].max())
        fullest = float(np.fmax.reduce(block["memory_pressure"][block["step"] == step]))
        if math.isfinite(fullest) and step >= self._fullest[0]:
            self._fullest = step, fullest
        codes = block["n_ranks"].astype(np.int64) << 40 | block["n_nodes"].astype(np.int64) << 16
        codes |= block["algorithm"].astype(np.int64) << 8
        codes |= block["n_channels"]
        connecting: dict[tuple[CommunicatorClass, Algorithm], int] = {}
        for code in set(np.unique(codes).tolist()) - self._heard:
            self._heard.add(code)
            communicator = CommunicatorClass(code >> 40, code >> 16 & 0xFFFFFF)
            if code >> 8 & 0xFF in _ALGORITHMS:
                own, algorithm = self._connected.setdefault(communicator, {}), Algorithm(code >> 8 & 0xFF)
                what = communicator, algorithm
                if algorithm not in own or what in connecting:
                    first = int(np.argmax(codes == code))
                    connecting[what] = min(first, connecting.get(what, first))
                own[algorithm] = max(own.get(algorithm, 0), code & 0xFF)
                self._promised.pop(what, None)
        return [*connecting.values()]

    def connected(self) -> Iterator[tuple[CommunicatorClass, Mapping[Algorithm, int]]]:
        """What has run on each kind of communicator, with the most channels."""
        yield from self._connected.items()

    def has_room_for(self, candidate: Candidate, communicator: CommunicatorClass) -> bool:
        """Whether `candidate` needs nothing but what is connected already."""
        if candidate.algorithm is None:
            return False
        n_channels = self._connected.get(communicator, {}).get(candidate.algorithm, 0)
        return 0 < candidate.n_channels <= n_channels

    def allows(self, candidate: Candidate, communicator: CommunicatorClass) -> bool:
        """Whether `candidate` may run."""
        algorithm, own = candidate.algorithm, self._connected.get(communicator, {})
        if self.is_short:
            return self.has_room_for(candidate, communicator)
        return algorithm is None or algorithm in own or self._may_connect(algorithm, communicator, own)

    def allows_all(self, settings: Collection[tuple[Candidate, CommunicatorClass]]) -> bool:
        """Whether all of these may run from one plan on."""
        new = {
            (communicator, candidate.algorithm): self._share(
                candidate.algorithm, communicator, self._connected.get(communicator, {})
            )
            for candidate, communicator in settings
            if candidate.algorithm is not None and not self.is_connected(candidate, communicator)
        }
        fits = not new or self._booked(*new) + sum(new.values()) <= self._threshold
        return fits and all(self.allows(*one) for one in settings)

    def promise(self, candidate: Candidate, communicator: CommunicatorClass) -> None:
        """`candidate` runs from the next plan on: what it connects is no longer free for others."""
        algorithm, own = candidate.algorithm, self._connected.get(communicator, {})
        if algorithm is not None and algorithm not in own:
            share = self._share(algorithm, communicator, own)
            self._promised[communicator, algorithm] = share, self._n_readings + PROMISE_READINGS

    @property
    def is_overbooked(self) -> bool:
        """What is to be connected soon does not fit any more."""
        return bool(self._promised) and (self.is_short or self._booked() > self._threshold)

    def take_back(self) -> None:
        """Nothing is to be connected."""
        self._promised.clear()

    def is_connected(self, candidate: Candidate, communicator: CommunicatorClass) -> bool:
        """Whether its algorithm has run."""
        return candidate.algorithm in self._connected.get(communicator, {})

    def least_gain(self, options: Sequence[Candidate], n_channels_now: int) -> npt.NDArray[np.float64]:
        """What each option must gain (log) for memory's sake: while it is short fewer channels are preferred."""
        if not self.is_short:
            return np.zeros(len(options))
        return MORE_CHANNELS_GAIN * np.array([option.n_channels > n_channels_now for option in options], np.float64)

    def _may_connect(self, algorithm: Algorithm, communicator: CommunicatorClass, own: Mapping[Algorithm, int]) -> bool:
        if (communicator, algorithm) in self._promised:
            return True
        self._promised = {what: one for what, one in self._promised.items() if one[1] > self._n_readings}
        return self._booked() + self._share(algorithm, communicator, own) <= self._threshold

    def _booked(self, *besides: tuple[CommunicatorClass, Algorithm]) -> float:
        """Memory that is in use or promised, the latter but for some."""
        return self.pressure + sum(share for what, (share, _) in self._promised.items() if what not in besides)

    def _share(self, algorithm: Algorithm, communicator: CommunicatorClass, own: Mapping[Algorithm, int]) -> float:
        """Part of the device's memory that connecting an algorithm would take; 0 where its memory is not known."""
        if self._device_mb <= 0:
            return 0.0
        n_channels = max(own.values(), default=_USUAL_CHANNELS)
        if self._channel_mb > 0:
            taken_mb = n_channels * self._channel_mb * memory.n_neighbours(algorithm, communicator)
        else:
            taken_mb = memory.connection_mb(algorithm, communicator, n_channels)
        return taken_mb / self._device_mb


def _number(fact: str | int | float | bool | None) -> float:
    return float(fact) if isinstance(fact, int | float) else 0.0


_USUAL_CHANNELS: Final = 16
_ALGORITHMS: Final = frozenset(int(member) for member in Algorithm)
