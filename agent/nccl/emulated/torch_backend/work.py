"""Handles of issued collectives, which torch.distributed returns."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from ..device import clock
from ..host.calls import IssuedCall

_NO_TIMEOUT = timedelta(0)
LAST_WORKS_S = 1.0
"""How long the end of the process waits for works in flight, and after an abort for their thread."""


class EmulatedWork(Work):
    """One or more issued calls, and the tensors that they fill."""

    def __init__(self, calls: Sequence[IssuedCall], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.calls = calls
        self._outputs = outputs
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Complete the calls; this rank's compute stream waits for their virtual end."""
        current = clock.current()
        current.arrival_us()
        current.wait_until(self._complete(timeout))
        current.skip_cpu()
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all ranks have issued the calls. If so, completes them; the clock does not advance."""
        if not all(call.communicator.is_ready(call) for call in self.calls):
            return False
        try:
            self._complete(_NO_TIMEOUT)
        except Exception:
            return True  # as torch: completed, not successful
        return True

    def is_success(self) -> bool:
        """Whether the calls have completed without an error."""
        return all(call.end_us is not None and call.error is None for call in self.calls)

    def exception(self) -> BaseException | None:
        """The first error, if any."""
        return next((call.error for call in self.calls if call.error is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The tensors that the calls fill."""
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future, completed by another thread; the virtual clock advances at the next `wait_for_futures`."""
        if self._future is None:
            done: torch.futures.Future[Any] = torch.futures.Future()
            # C++ would take an error that Python sets for a value; an error raised in `_value` is an error.
            self._future = done.then(_value)
            clock.current().add_future(lambda: self._complete(_NO_TIMEOUT))
            _progress.submit(self, done)
        return self._future

    def abort(self) -> None:
        """End all waits for the calls with an error."""
        for call in self.calls:
            call.communicator.rendezvous.abort()

    def _complete(self, timeout: timedelta) -> float:
        timeout_us = int(timeout.total_seconds() * 1e6)
        end_us = 0.0
        for call in self.calls:
            end_us = max(end_us, call.communicator.complete(call, timeout_us or None))
        return end_us

    def _fulfil(self, future: torch.futures.Future[Any]) -> None:
        try:
            self._complete(_NO_TIMEOUT)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(list(self._outputs))


def _value(future: torch.futures.Future[Any]) -> Any:
    return future.value()


class _Progress:
    """Owns thread `emulated-nccl`: completes works with a future, for which C++ may wait without a call from Python."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[tuple[EmulatedWork, torch.futures.Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._current: EmulatedWork | None = None

    def submit(self, work: EmulatedWork, future: torch.futures.Future[Any]) -> None:
        if self._thread is None or not self._thread.is_alive():  # a forked child has no thread
            self._thread = threading.Thread(target=self._run, name="emulated-nccl", daemon=True)
            self._thread.start()
            atexit.unregister(self.close)
            atexit.register(self.close)
        self._works.put((work, future))

    def close(self) -> None:
        """At exit: a thread that returns from C++ while the interpreter ends would crash the process."""
        self._works.put(None)
        thread, work = self._thread, self._current
        if thread is None:
            return
        thread.join(LAST_WORKS_S)
        if thread.is_alive() and work is not None:
            work.abort()
            thread.join(LAST_WORKS_S)

    def _run(self) -> None:
        while (item := self._works.get()) is not None:
            work, future = item
            self._current = work
            work._fulfil(future)
            self._current = None
            del work, future, item


_progress = _Progress()
