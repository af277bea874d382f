"""Figures about the tuning of this job, from this rank and its daemon's latest status. Never blocks, never raises."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final, NamedTuple

from ...store.wire import JobStatus
from .. import activate
from ..daemon_link.asking import fetch_status
from ..session import Session

logger = logging.getLogger("zerotune.callbacks")

ASK_EVERY_S: Final = 5.0
"""Figures may be this old; trainers log more seldom."""
ASK_TIMEOUT_S: Final = 1.0
"""A thread of its own asks: nothing waits for it."""
OFF, SILENT, UNKNOWN_JOB, OK = "off", "no daemon answers", "the daemon does not know this job", "ok"


class Figures(NamedTuple):
    """Figures at one time; None: not known (yet)."""

    step: int = 0
    epoch: int = 0
    """Of the plan in force; 0: NCCL's own choice."""
    step_s: float | None = None
    """Median of the latest 64 steps."""
    tuned_share: float | None = None
    """Share of this rank's collectives, since the previous figures, to which a plan's setting applied."""
    saved_share: float | None = None
    """Share of a step's time saved against NCCL's own choice in the steps beside it; see `RecentSteps.saved`."""
    budget_spent_share: float | None = None
    """Share of step time that exploring has cost."""
    health: str = OFF
    """`ok`, or the problem, as `zerotune status` prints it; `off`: the agent is not in this process."""

    def scalars(self) -> dict[str, float]:
        """The known figures by name, for trackers; empty if the agent is off."""
        if self.health == OFF:
            return {}
        found = {
            "zerotune/epoch": float(self.epoch),
            "zerotune/step_seconds": self.step_s,
            "zerotune/tuned_ratio": self.tuned_share,
            "zerotune/saved_ratio": self.saved_share,
            "zerotune/budget_spent_ratio": self.budget_spent_share,
            "zerotune/healthy": float(self.health == OK),
        }
        return {name: value for name, value in found.items() if value is not None}


class StatusCache:
    """Owns thread `zerotune-figures`: asks the daemon for this job's status, for as long as `look` is called."""

    def __init__(self) -> None:
        self._status: tuple[JobStatus | None, str] = (None, OK)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._requested = threading.Event()

    def look(self, session: Session) -> tuple[JobStatus | None, str]:
        """The latest status and the health; OK until the daemon was asked."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._ask, args=(session,), name="zerotune-figures", daemon=True)
                self._thread.start()
        self._requested.set()
        return self._status

    def _ask(self, session: Session) -> None:
        while self._requested.wait():
            self._requested.clear()
            try:
                reply, job_id = fetch_status(session.endpoint, ASK_TIMEOUT_S), session.job_id
                status = next((job for job in reply.jobs if job.job_id == job_id), None) if reply else None
                silence = SILENT if reply is None else UNKNOWN_JOB
                self._status = status, silence if status is None else status.health
            except Exception as error:  # another user's daemon, or no keys for it
                logger.debug("zerotune: the daemon's status is not known: %r", error)
                self._status = None, SILENT
            time.sleep(ASK_EVERY_S)


status_cache = StatusCache()


class Watch:
    """Reads this process's figures. Each reader needs its own: `tuned_share` counts from the reader's last call."""

    def __init__(self) -> None:
        self._n_calls, self._n_matched = 0, 0

    def figures(self) -> Figures:
        """The current figures. Never waits, never raises."""
        try:
            installed = activate.installed
            return Figures() if installed is None else self._look(installed.session)
        except Exception as error:
            logger.debug("zerotune: no figures: %r", error)
            return Figures()

    def _look(self, session: Session) -> Figures:
        steps, (status, health) = session.recent_steps, status_cache.look(session)
        last, step_us, saved = steps.last, steps.step_us(), steps.saved()
        return Figures(
            step=last.step if last is not None else 0,
            epoch=last.epoch if last is not None else 0,
            step_s=None if step_us is None else step_us / 1e6,
            tuned_share=self._tuned_share(session),
            saved_share=None if saved is None else saved.share,
            budget_spent_share=None if status is None else status.exploration_spent_percent / 100,
            health=health,
        )

    def _tuned_share(self, session: Session) -> float | None:
        if (counters := session.counters()) is None:
            return None
        n_calls, n_matched = counters.n_calls - self._n_calls, counters.n_matched - self._n_matched
        self._n_calls, self._n_matched = counters.n_calls, counters.n_matched
        return n_matched / n_calls if n_calls > 0 else None


own_watch = Watch()


def figures() -> Figures:
    """The current figures of this process's job. Never waits, never raises."""
    return own_watch.figures()
