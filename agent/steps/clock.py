"""The training clock: when steps end on the device, and how much communication was exposed until then.

The host enqueues work and runs ahead. So the end of a step is *noted* by the host, and read once the device has reached
it: events of CUDA with the real NCCL, the virtual clock with the emulated one, so that emulated figures are the same on
any machine. Without a device of its own it is the machine's clock.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

MAX_UNDERWAY: Final = 64
"""Steps by which a host may run ahead of what is timed: launch queues are full much sooner."""


class Instant(Protocol):
    """A point in the device's time."""

    def has_come(self) -> bool:
        """The device has reached it."""

    def us_since(self, earlier: Any) -> float:
        """Microseconds since another one of this clock, if both have come; NaN if the two cannot be compared."""

    def exposed_since(self, earlier: Any) -> float | None:
        """Communication that computation had to wait for since then; None: unknown."""


class TrainingClock(Protocol):
    """Tells the time of this rank's training."""

    is_trainings: bool
    """Only the thread that trains may read what it has noted."""

    def note(self) -> Instant | None:
        """The end of all that is enqueued now, by the thread that trains; None if that cannot be told."""


def _at_once() -> bool:
    return True


class Reading(NamedTuple):
    """What a clock showed."""

    now_us: float
    exposed_us: float | None = None
    """Cumulated."""
    has_come: Callable[[], bool] = _at_once

    def us_since(self, earlier: Reading) -> float:
        """Microseconds since another reading of this clock."""
        return self.now_us - earlier.now_us

    def exposed_since(self, earlier: Reading) -> float | None:
        """Communication that computation had to wait for since then; None: unknown."""
        if self.exposed_us is None or earlier.exposed_us is None:
            return None
        return self.exposed_us - earlier.exposed_us


class WallClock:
    """The machine's monotonic clock; it cannot tell exposed communication."""

    is_trainings = False

    def note(self) -> Reading:
        """Now."""
        return Reading(time.perf_counter_ns() / 1000)


class DeviceReading(Reading):
    """What an emulated device's clock showed: never compared with the machine's."""

    __slots__ = ()


class VirtualClock:
    """The emulated device's clock, as far behind the host as the emulation was told to be."""

    is_trainings = False

    def __init__(self) -> None:
        from ..nccl.emulated.device import clock

        self._device = clock
        self._n_noted = 0

    def note(self) -> DeviceReading:
        """What the compute stream shows; it has come so many steps later."""
        device, self._n_noted = self._device.current(), self._n_noted + 1
        now_us, exposed_us = device.reading()
        known_us = exposed_us if device.is_exposure_known else None
        if not device.host_ahead:
            return DeviceReading(now_us, known_us)
        comes_at = self._n_noted + device.host_ahead
        return DeviceReading(now_us, known_us, lambda: self._n_noted >= comes_at)


class DeviceEvent(Protocol):
    """The part of `torch.cuda.Event` that is needed."""

    def record(self) -> None:
        """It comes when all that is enqueued on the current stream has run."""

    def query(self) -> bool:
        """It has come. Never waits."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds until another one that has come, too."""


class Cuda(Protocol):
    """The part of `torch.cuda` that is needed."""

    def is_current_stream_capturing(self) -> bool:
        """A graph is being captured."""

    def current_device(self) -> int:
        """Index of the device."""

    def Event(self, *, enable_timing: bool) -> DeviceEvent:
        """A new event."""


class EventInstant(NamedTuple):
    """An event on a device."""

    cuda: Cuda
    device: int
    event: DeviceEvent

    def has_come(self) -> bool:
        """The device has reached it; never, if the device has failed. Not asked while a graph is captured."""
        try:
            return not self.cuda.is_current_stream_capturing() and self.event.query()
        except RuntimeError:
            return False

    def us_since(self, earlier: EventInstant) -> float:
        """Microseconds since another one; NaN if it is another device's."""
        if self.device != earlier.device:
            return math.nan
        try:
            return 1000.0 * earlier.event.elapsed_time(self.event)
        except RuntimeError:
            return math.nan

    def exposed_since(self, _: EventInstant) -> None:
        """Unknown: no wait is seen."""


class EventClock:
    """Notes events on the current stream, by turns of a fixed number for each device: in steady state none is made.

    It belongs to the thread that trains, which also reads the events: a query by any other thread would break a graph
    that this one captures. Nothing here ever waits for the device.
    """

    is_trainings = True

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._events: dict[int, list[EventInstant]] = {}
        self._n_noted = 0

    def note(self) -> EventInstant | None:
        """An event on the current stream; None while a graph is captured, or if the device has failed."""
        try:
            if self._cuda.is_current_stream_capturing():
                return None
            device = self._cuda.current_device()
            events = self._events.get(device)
            if events is None:  # two more than wait to be read: what the oldest began with, and the next one
                made = [self._cuda.Event(enable_timing=True) for _ in range(MAX_UNDERWAY + 2)]
                events = self._events[device] = [EventInstant(self._cuda, device, event) for event in made]
            instant = events[self._n_noted % len(events)]
            instant.event.record()
        except RuntimeError:
            return None
        self._n_noted += 1
        return instant


def device_clock() -> TrainingClock:
    """CUDA's events if this process uses CUDA by now, else the machine's clock."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return EventClock(cuda) if cuda is not None and cuda.is_initialized() else WallClock()
