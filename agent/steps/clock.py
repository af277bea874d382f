"""The training clock: when steps end on the device, and how much communication was exposed until then.

The host enqueues work and runs ahead of the device. So the host *notes* the end of a step, and reads its time after the
device has reached it. With the real NCCL notes are CUDA events. The emulated NCCL has a virtual clock, so that its
figures are the same on any machine. Without a device the machine's clock counts.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

MAX_UNDERWAY: Final = 64
"""Steps by which a host may run ahead of the latest timed step: launch queues fill up much sooner."""


class Instant(Protocol):
    """A point in the device's time."""

    def is_reached(self) -> bool:
        """Whether the device has reached it."""

    def us_since(self, earlier: Any) -> float:
        """Microseconds since an earlier instant that was reached; NaN if the two cannot be compared."""

    def exposed_since(self, earlier: Any) -> float | None:
        """Exposed communication since then, in microseconds; None: unknown."""


class TrainingClock(Protocol):
    """The clock of this rank's training."""

    training_thread_only: bool
    """Whether only the training thread may read its instants."""

    def note(self) -> Instant | None:
        """The end of all work enqueued by now; called by the training thread. None: it cannot be known."""


def _at_once() -> bool:
    return True


class Reading(NamedTuple):
    """An `Instant` of a clock that can be read at once."""

    now_us: float
    exposed_us: float | None = None
    """Cumulated."""
    is_reached: Callable[[], bool] = _at_once

    def us_since(self, earlier: Reading) -> float:
        """Microseconds since another reading of this clock."""
        return self.now_us - earlier.now_us

    def exposed_since(self, earlier: Reading) -> float | None:
        """Exposed communication since then; None: unknown."""
        if self.exposed_us is None or earlier.exposed_us is None:
            return None
        return self.exposed_us - earlier.exposed_us


class WallClock:
    """The machine's monotonic clock; it does not know exposed communication."""

    training_thread_only = False

    def note(self) -> Reading:
        """Now."""
        return Reading(time.perf_counter_ns() / 1000)


class DeviceReading(Reading):
    """A reading of the emulated device's clock, which is never compared with the machine's."""

    __slots__ = ()


class VirtualClock:
    """The emulated device's clock; its instants are reached as many steps later as the emulation is set to lag."""

    training_thread_only = False

    def __init__(self) -> None:
        from ..nccl.emulated.device import clock

        self._device = clock
        self._n_noted = 0

    def note(self) -> DeviceReading:
        """A reading of the compute stream, which is reached `host_ahead` steps later."""
        device, self._n_noted = self._device.current(), self._n_noted + 1
        now_us, exposed_us = device.reading()
        known_us = exposed_us if device.is_exposure_known else None
        if not device.host_ahead:
            return DeviceReading(now_us, known_us)
        reached_at = self._n_noted + device.host_ahead
        return DeviceReading(now_us, known_us, lambda: self._n_noted >= reached_at)


class DeviceEvent(Protocol):
    """The part of `torch.cuda.Event` that is needed."""

    def record(self) -> None:
        """Enqueue the event on the current stream."""

    def query(self) -> bool:
        """Whether it was reached. Never waits."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds until another event that was reached."""


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

    def is_reached(self) -> bool:
        """Whether the device has reached it; False after a device error or while a graph is captured."""
        try:
            return not self.cuda.is_current_stream_capturing() and self.event.query()
        except RuntimeError:
            return False

    def us_since(self, earlier: EventInstant) -> float:
        """Microseconds since an earlier event; NaN if that is on another device."""
        if self.device != earlier.device:
            return math.nan
        try:
            return 1000.0 * earlier.event.elapsed_time(self.event)
        except RuntimeError:
            return math.nan

    def exposed_since(self, _: EventInstant) -> None:
        """Unknown: CUDA events do not show waits."""


class EventClock:
    """Records events on the current stream. It reuses a fixed number for each device: in steady state none is created.

    Only the training thread uses it: a query by another thread would break a graph that the training thread captures.
    Nothing here ever waits for the device.
    """

    training_thread_only = True

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
            if events is None:  # two more than may be unread: the begin of the oldest unread step, and the next event
                made = [self._cuda.Event(enable_timing=True) for _ in range(MAX_UNDERWAY + 2)]
                events = self._events[device] = [EventInstant(self._cuda, device, event) for event in made]
            instant = events[self._n_noted % len(events)]
            instant.event.record()
        except RuntimeError:
            return None
        self._n_noted += 1
        return instant


def device_clock() -> TrainingClock:
    """An `EventClock` if this process uses CUDA by now, else the machine's clock."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return EventClock(cuda) if cuda is not None and cuda.is_initialized() else WallClock()
