"""Steps, decisions and keys of running jobs, from the store.

They are read from the daemon's file over a separate connection, a little at a time, without asking the daemon.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ...store.errors import StoreError
from ...store.records import Decision, StepRecord
from ...store.sqlite.database import Store
from ..offline.explaining.job import explain_in
from ..offline.explaining.values import Explanation

MAX_STEPS: Final = 2000
"""Most steps of a job that are kept, the newest."""
MAX_DECISIONS: Final = 60
KEYS_EVERY_S: Final = 5.0
KEYS_SHARE: Final = 0.05
"""Largest share of time for explaining keys, whose medians need all measurements."""
RETRY_S: Final = 5.0


@dataclass
class JobHistory:
    """The history of one job."""

    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    decisions: Sequence[Decision] = ()
    """The newest decisions, oldest first."""
    keys: Sequence[Explanation] | None = None
    """Keys by their time in a step, the largest first; None: not explained yet."""
    newest_row: int = 0
    """The newest row of decisions that was read."""
    explained: tuple[int, int] = (0, -1)
    """The newest row and step at the last explanation of `keys`."""
    keys_due_s: float = 0.0


class History:
    """Reads one daemon's store; belongs to one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.problem = ""
        """Why the store cannot be read; empty if it can."""
        self._clock = clock
        self._store: Store | None = None
        self._file: os.stat_result | None = None
        self._jobs: dict[str, JobHistory] = {}
        self._retry_at_s = 0.0

    def of(self, path: Path, job_ids: Sequence[str]) -> dict[str, JobHistory]:
        """The histories of connected jobs by id; others are forgotten.

        It is empty if the store cannot be read here: `problem` has the reason.
        """
        self._jobs = {job_id: self._jobs.get(job_id, JobHistory()) for job_id in job_ids}
        try:
            if (store := self._opened(path)) is not None:
                for job_id in job_ids:
                    self._read(store, self._jobs[job_id], job_id)
        except (StoreError, sqlite3.Error, OSError) as error:
            self.problem = str(error)
            self.close()
            self._retry_at_s = self._clock() + RETRY_S
        return {} if self.problem else self._jobs

    def close(self) -> None:
        """Close the file."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _opened(self, path: Path) -> Store | None:
        if self._store is None and self._clock() < self._retry_at_s:
            return None
        found = os.stat(path)
        if self._store is not None and self._file is not None and not os.path.samestat(found, self._file):
            self.close()  # another file took its place
        if self._store is None:
            self._store, self._file = Store.open(path, read_only=True), found
        self.problem = ""
        return self._store

    def _read(self, store: Store, known: JobHistory, job_id: str) -> None:
        last = known.steps[-1].step if known.steps else -1
        known.steps.extend(store.steps(job_id, after=last, limit=MAX_STEPS))
        row = store.newest_decision(job_id)
        if row != known.newest_row:
            known.decisions = store.decisions(job_id, limit=MAX_DECISIONS, with_control=False)
            known.newest_row = row
        newest = (row, known.steps[-1].step if known.steps else -1)
        began_s = self._clock()
        if newest != known.explained and began_s >= known.keys_due_s:
            job = next((one for one in store.jobs() if one.job_id == job_id), None)
            known.keys = None if job is None else explain_in(store, job, guesses=False)
            known.explained = newest
            known.keys_due_s = began_s + max(KEYS_EVERY_S, (self._clock() - began_s) / KEYS_SHARE)
