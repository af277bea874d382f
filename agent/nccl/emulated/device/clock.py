"""This rank's virtual time: one compute stream, and the channels that collectives hold on the device.

All times are microseconds from the first use in the process. Computation advances the compute stream; it takes longer
while collectives hold channels. A collective arrives at the time at which it is issued. Waiting for it moves the
compute stream to the collective's end, and the skipped time counts as exposed communication. Nothing here sleeps, and
nothing reads a real clock unless computation is *measured*.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple


class _Hold(NamedTuple):
    start_us: float
    end_us: float
    n_channels: int


def _no_slowdown(_n_channels: int) -> float:
    return 1.0


class Clock:
    """A rank's timelines; thread-safe."""

    def __init__(
        self, sms_slowdown: Callable[[int], float] = _no_slowdown, measured_scale: float | None = None
    ) -> None:
        self.sms_slowdown = sms_slowdown
        self.measured_scale = measured_scale
        """Virtual microseconds per microsecond of this thread's CPU time; None: hooks estimate computation."""
        self.recorder: Callable[[float], object] | None = None
        """Under graph capture: gets computation in place of the timeline."""
        self.host_ahead = 0
        """Steps by which the host runs ahead of this device: the ends of steps are reached that much later."""
        self.is_exposure_known = True
        """False: exposed communication is unknown, as on a GPU."""
        self._now_us = 0.0
        self._exposed_us = 0.0
        self._holds: list[_Hold] = []
        self._futures: list[Callable[[], float]] = []
        self._lock = threading.RLock()
        self._cpu = threading.local()

    def reading(self) -> tuple[float, float]:
        """`now_us` and `exposed_us`, which belong together if the computing thread asks."""
        self.wait_for_futures()
        return self._now_us, self._exposed_us

    def now_us(self) -> float:
        """The compute stream's time, after all waits."""
        return self.reading()[0]

    def exposed_us(self) -> float:
        """Cumulated exposed communication."""
        return self.reading()[1]

    def advance(self, work_us: float) -> None:
        """Compute for `work_us`, the duration without a collective on the device."""
        if self.recorder is not None:
            self.recorder(float(work_us))
            return
        with self._lock:
            if not self._holds:
                self._now_us += work_us
                return
            now_us, left_us = self._now_us, work_us
            while left_us > 0:
                self._holds = [hold for hold in self._holds if hold.end_us > now_us]
                if not self._holds:
                    now_us += left_us
                    break
                n_channels = sum(hold.n_channels for hold in self._holds if hold.start_us <= now_us)
                change_us = min(hold.end_us if hold.start_us <= now_us else hold.start_us for hold in self._holds)
                slowdown = self.sms_slowdown(n_channels) if n_channels else 1.0
                done_us = (change_us - now_us) / slowdown
                if done_us >= left_us:
                    now_us += left_us * slowdown
                    break
                left_us -= done_us
                now_us = change_us
            self._now_us = now_us

    def arrival_us(self) -> float:
        """The arrival time of a collective issued now; adds measured computation first."""
        if self.measured_scale is not None:
            self._charge_cpu()
        with self._lock:
            return self._now_us

    def hold(self, start_us: float, end_us: float, n_channels: int) -> None:
        """A collective occupies channels of this device, which slows computation until `end_us`."""
        if n_channels > 0 and end_us > start_us:
            with self._lock:
                self._holds.append(_Hold(start_us, end_us, n_channels))

    def wait_until(self, end_us: float) -> None:
        """The compute stream waits until `end_us`."""
        with self._lock:
            if end_us > self._now_us:
                self._exposed_us += end_us - self._now_us
                self._now_us = end_us
                # Not only in `advance`: a job without computation would keep every collective.
                self._holds = [hold for hold in self._holds if hold.end_us > end_us]

    def add_future(self, completion: Callable[[], float]) -> None:
        """At the next `wait_for_futures`, wait until `completion()` (a time): for futures, whose waits are hidden."""
        with self._lock:
            self._futures.append(completion)

    def wait_for_futures(self) -> None:
        """Wait for all of `add_future`; called where a training script must have waited for them."""
        if not self._futures:
            return
        with self._lock:
            futures, self._futures = self._futures, []
        for completion in futures:
            self.wait_until(completion())

    def skip_cpu(self) -> None:
        """Do not count this thread's CPU time up to now as computation."""
        if self.measured_scale is not None:
            self._cpu.last_s = time.thread_time()

    def _charge_cpu(self) -> None:
        now_s = time.thread_time()
        last_s = getattr(self._cpu, "last_s", now_s)
        self._cpu.last_s = now_s
        if self.measured_scale is not None and now_s > last_s:
            self.advance((now_s - last_s) * 1e6 * self.measured_scale)


_clock = Clock()


def current() -> Clock:
    """The process's clock."""
    return _clock


def reset(clock: Clock | None = None) -> Clock:
    """For tests: start again at 0; returns the new clock."""
    global _clock
    _clock = clock or Clock()
    return _clock


def now_us() -> float:
    """This rank's compute-stream time in virtual microseconds."""
    return _clock.now_us()


def exposed_us() -> float:
    """Cumulated exposed communication in virtual microseconds."""
    return _clock.exposed_us()


def mark_compute_us(work_us: float) -> None:
    """Add computation of `work_us` (without a collective) now; for work that no hook sees."""
    _clock.advance(work_us)
