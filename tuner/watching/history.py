"""What the store tells of jobs that run: their steps, their decisions, and what each key takes and saves.

Read from the daemon's file by a connection of our own, a little at a time, so that the daemon is not asked for it.
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
"""The newest so many steps of a job are kept."""
MAX_DECISIONS: Final = 60
KEYS_EVERY_S: Final = 5.0
KEYS_SHARE: Final = 0.05
"""Of the time, what explaining keys may take at most: their medians are of all that was measured."""
RETRY_S: Final = 5.0


@dataclass
class JobHistory:
    """Of one job."""

    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    decisions: Sequence[Decision] = ()
    """The newest, oldest first."""
    keys: Sequence[Explanation] | None = None
    """Those first that take most of a step; None: not explained yet."""
    newest_row: int = 0
    """Of the decisions that were read."""
    explained: tuple[int, int] = (0, -1)
    """The newest row and step when `keys` were explained."""
    keys_due_s: float = 0.0


class History:
    """Reads one daemon's store; belongs to one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.problem = ""
        """Why nothing can be read; empty while it can be."""
        self._clock = clock
        self._store: Store | None = None
        self._file: os.stat_result | None = None
        self._jobs: dict[str, JobHistory] = {}
        self._retry_at_s = 0.0

    def of(self, path: Path, job_ids: Sequence[str]) -> dict[str, JobHistory]:
        """What is known by now.

        Args:
            job_ids: of those that are connected; others are forgotten.

        Returns:
            By job id; nothing where the store cannot be read here, for which `problem` has the reason.
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
            self.close()  # another one took its place
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
