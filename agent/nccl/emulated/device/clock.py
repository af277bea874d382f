"""This rank's virtual time: one compute stream, and the channels that collectives hold on the device.

All times are microseconds from the first use in the process. Computation advances the compute stream, more
slowly while collectives hold channels; a collective arrives at the time at which it is issued; waiting for
it moves the compute stream to the collective's end, and what it skips counts as exposed communication.
Nothing here sleeps and, unless computation is *measured*, nothing reads a real clock.
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
        """Virtual microseconds per microsecond of this thread's CPU time; None: hooks say what work costs."""
        self.recorder: Callable[[float], object] | None = None
        """Under graph capture: takes computation in place of the timeline."""
        self.host_ahead = 0
        """Steps by which the host is said to run ahead of this device: their ends are told so much later."""
        self.is_exposure_known = True
        """False: as on a GPU, nobody is told what computation waited for."""
        self._now_us = 0.0
        self._exposed_us = 0.0
        self._holds: list[_Hold] = []
        self._owed: list[Callable[[], float]] = []
        self._lock = threading.RLock()
        self._cpu = threading.local()

    def reading(self) -> tuple[float, float]:
        """`now_us` and `exposed_us` of one moment, if this thread is the one that computes."""
        self.settle()
        return self._now_us, self._exposed_us

    def now_us(self) -> float:
        """The compute stream's time, after everything it has been told to wait for."""
        return self.reading()[0]

    def exposed_us(self) -> float:
        """Communication that computation had to wait for, cumulated."""
        return self.reading()[1]

    def advance(self, work_us: float) -> None:
        """Compute for `work_us`, as it would take with no collective on the device."""
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
        """Time at which something is issued now; charges measured computation first."""
        if self.measured_scale is not None:
            self._charge_cpu()
        with self._lock:
            return self._now_us

    def hold(self, start_us: float, end_us: float, n_channels: int) -> None:
        """A collective occupies channels of this device for a time, in which computation is slower.

        Args:
            end_us: on the virtual clock; nothing happens unless it is after `start_us`.
            n_channels: that it occupies; 0: none.
        """
        if n_channels > 0 and end_us > start_us:
            with self._lock:
                self._holds.append(_Hold(start_us, end_us, n_channels))

    def wait_until(self, end_us: float) -> None:
        """The compute stream waits for something that ends at `end_us`."""
        with self._lock:
            if end_us > self._now_us:
                self._exposed_us += end_us - self._now_us
                self._now_us = end_us
                # Not left to `advance`: a job that only communicates would keep every collective that it ever ran.
                self._holds = [hold for hold in self._holds if hold.end_us > end_us]

    def owe(self, completion: Callable[[], float]) -> None:
        """Wait for the time that `completion()` returns, at the next `settle`: waits for futures are not seen here."""
        with self._lock:
            self._owed.append(completion)

    def settle(self) -> None:
        """Wait for everything owed; called where a training script must have waited."""
        if not self._owed:
            return
        with self._lock:
            owed, self._owed = self._owed, []
        for completion in owed:
            self.wait_until(completion())

    def skip_cpu(self) -> None:
        """CPU time of this thread up to now was emulation, not computation."""
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
    """Start again at 0, for tests; returns the new clock."""
    global _clock
    _clock = clock or Clock()
    return _clock


def now_us() -> float:
    """This rank's compute-stream time in virtual microseconds."""
    return _clock.now_us()


def exposed_us() -> float:
    """Cumulated communication that computation had to wait for, in virtual microseconds."""
    return _clock.exposed_us()


def mark_compute_us(work_us: float) -> None:
    """Say that this rank computes for `work_us` (undisturbed) now; for work that no hook can see."""
    _clock.advance(work_us)
