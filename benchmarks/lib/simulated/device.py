"""A simulated device: it runs enqueued work on request, and has the events of torch."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

RESOLUTION_US = 0.5
"""Of the time between two events, as CUDA documents it."""


class Device:
    """Stands for `torch.cuda`: a host enqueues steps that run later."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.index = 0
        self.is_capturing = False
        self.has_failed = False
        self.n_made = 0
        """Events."""
        self.n_touched_in_capture = 0
        """Calls that would have broken the graph."""
        self._queue: deque[float | DeviceEvent] = deque()
        self._n_steps = 0

    def enqueue(self, work_us: float) -> None:
        self._queue.append(work_us)
        self._n_steps += 1

    def run(self, n_left: int = 0) -> None:
        """Run the enqueued steps, except the last `n_left`."""
        while self._queue and (self._n_steps > n_left or isinstance(self._queue[0], DeviceEvent)):
            one = self._queue.popleft()
            if isinstance(one, DeviceEvent):
                one.at_us = self.now_us
            else:
                self.now_us += one
                self._n_steps -= 1

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def current_device(self) -> int:
        return self.index

    def Event(self, *, enable_timing: bool) -> DeviceEvent:
        assert enable_timing
        self.n_made += 1
        return DeviceEvent(self)

    def recorded(self, event: DeviceEvent) -> None:
        """The event happens once all enqueued work has run."""
        self._queue.append(event)
        self.run(self._n_steps)


class DeviceEvent:
    """The interface of `torch.cuda.Event`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.at_us = math.nan

    def _touch(self) -> None:
        self._device.n_touched_in_capture += self._device.is_capturing
        if self._device.has_failed:
            raise RuntimeError("an illegal memory access was encountered")

    def record(self) -> None:
        self._touch()
        self.at_us = math.nan
        self._device.recorded(self)

    def query(self) -> bool:
        self._touch()
        return not math.isnan(self.at_us)

    def elapsed_time(self, end_event: DeviceEvent) -> float:
        self._touch()
        assert self.query()
        assert end_event.query()
        us = RESOLUTION_US * round((end_event.at_us - self.at_us) / RESOLUTION_US)
        return float(np.float32(us / 1000.0))
