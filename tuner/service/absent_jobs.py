"""Jobs that `zerotune status` shows although they are no longer connected."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from typing import Final

import msgspec

from ...store.wire import EndedJob

MAX_ENDED: Final = 3


class AbsentJobs:
    """The jobs that ended last; `clock` is the service's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: deque[tuple[float, EndedJob]] = deque(maxlen=MAX_ENDED)

    def has_ended(
        self, job_id: str, name: str, step: int, *, silent_since_s: float | None = None, failure: str = ""
    ) -> EndedJob:
        """Record that the last rank of a job has left, or has been silent for too long.

        A late rank may greet after the others have left, and leave at once: the job's earlier record is kept.

        `failure` names the rank whose script an exception ended, and the exception's type.

        Args:
            silent_since_s: when the first silent rank sent its last message; None if all said goodbye.
        """
        ended_at_s = self._clock() if silent_since_s is None else silent_since_s
        job = EndedJob(job_id, step, silent_since_s is not None, name=name, failure=failure)
        for earlier in [one for one in self._ended if one[1].job_id == job_id]:
            self._ended.remove(earlier)
            if not step:
                ended_at_s = earlier[0]
                job = msgspec.structs.replace(earlier[1], failure=earlier[1].failure or failure)
        self._ended.append((ended_at_s, job))
        return job

    def ended(self, connected: Container[str]) -> tuple[EndedJob, ...]:
        """The jobs that ended last, newest first, without those that are connected again."""
        now_s = self._clock()
        return tuple(
            msgspec.structs.replace(job, ended_s_ago=now_s - at_s)
            for at_s, job in reversed(self._ended)
            if job.job_id not in connected
        )
