"""A job as its host sees it: how far the device is behind, whether exposure is known, and which clock times steps.

While calls of step k are enqueued, the device is at step k - `host_ahead`. So measurements arrive that many steps
later. If the host's clock times steps, step k gets the duration of step k - `host_ahead`: a full launch queue holds the
host until a step of the device ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple

import msgspec
import numpy as np

from zerotune.store.records import StepRecord

MOST_AHEAD: Final = 4
"""Steps: launch queues hold about a thousand kernels, and graphs make a step few of them."""
LAUNCH_SHARE: Final = 0.1
"""Time to enqueue a step on a free queue, as a share of the device's time for it."""


class HostView(NamedTuple):
    """The agent's view of a job."""

    host_ahead: int = 0
    """Steps."""
    is_exposure_known: bool = True
    has_events: bool = True
    """Steps are timed by events on the device; else by the host's clock."""


IN_LOCKSTEP: Final = HostView()
AS_A_GPU_TELLS: Final = HostView(3, is_exposure_known=False)
"""Three steps late, without exposure."""
_usual: ContextVar[HostView] = ContextVar("view", default=IN_LOCKSTEP)


def usual_view() -> HostView:
    """The view of jobs unless `seen_as` sets another."""
    return _usual.get()


@contextmanager
def seen_as(view: HostView) -> Iterator[None]:
    """Jobs that are made inside have this view."""
    token = _usual.set(view)
    try:
        yield
    finally:
        _usual.reset(token)


class Underway:
    """Steps that were enqueued and have not run yet."""

    def __init__(self, view: HostView) -> None:
        self._view = view
        self._steps: deque[tuple[np.ndarray, StepRecord]] = deque()

    def enqueued(self, block: np.ndarray, record: StepRecord) -> tuple[np.ndarray | None, StepRecord | None]:
        """The host has enqueued a step.

        Args:
            block: measurements of its calls.
            record: of the step, as it will run.

        Returns:
            Measurements of the calls that have run by now, and the step that is reported now; None: none yet.
        """
        view = self._view
        if not view.is_exposure_known:
            record = msgspec.structs.replace(record, exposed_us=None)
        self._steps.append((block, record))
        ran, ended = self._steps.popleft() if len(self._steps) > view.host_ahead else (None, None)
        if view.has_events:
            return ran, ended
        host_us = LAUNCH_SHARE * record.duration_us if ended is None else ended.duration_us
        return ran, msgspec.structs.replace(record, duration_us=host_us)
