"""What the store tells of jobs that run: their steps, decisions and winners.

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
from ..decided import decisions_that_ran, settled_decisions, since_takeover
from ..modeling.medians import medians
from ..modeling.statistics import statistics
from ..offline.comparison import compare
from ..offline.winners import WinnerTable, winner_table

MAX_STEPS: Final = 2000
"""The newest so many steps of a job are kept."""
MAX_DECISIONS: Final = 60
WINNERS_EVERY_S: Final = 5.0
WINNERS_SHARE: Final = 0.05
"""Of the time, what medians for the winners may take at most: they are of all that was measured."""
RETRY_S: Final = 5.0


@dataclass
class JobHistory:
    """Of one job."""

    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    decisions: Sequence[Decision] = ()
    """The newest, oldest first."""
    winners: WinnerTable | None = None
    newest_row: int = 0
    """Of the decisions that were read."""
    winners_row: int = 0
    """Of the decisions that `winners` shows."""
    winners_epoch: int = 0
    winners_due_s: float = 0.0


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

    def of(self, path: Path, jobs: Sequence[tuple[str, str]]) -> dict[str, JobHistory]:
        """What is known by now.

        Args:
            jobs: (job id, fabric id) of each that is connected; others are forgotten.

        Returns:
            By job id; nothing where the store cannot be read here, for which `problem` has the reason.
        """
        self._jobs = {job_id: self._jobs.get(job_id, JobHistory()) for job_id, _ in jobs}
        try:
            if (store := self._opened(path)) is not None:
                for job_id, fabric_id in jobs:
                    self._read(store, self._jobs[job_id], job_id, fabric_id)
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

    def _read(self, store: Store, known: JobHistory, job_id: str, fabric_id: str) -> None:
        last = known.steps[-1].step if known.steps else -1
        known.steps.extend(store.steps(job_id, after=last, limit=MAX_STEPS))
        row = store.newest_decision(job_id)
        if row != known.newest_row:
            known.decisions = store.decisions(job_id, limit=MAX_DECISIONS, with_control=False)
            known.newest_row = row
        epoch = known.steps[-1].epoch if known.steps else 0
        is_new = (row, epoch) != (known.winners_row, known.winners_epoch)
        began_s = self._clock()
        if row and is_new and began_s >= known.winners_due_s:
            known.winners = _winners(store, job_id, fabric_id)
            known.winners_row, known.winners_epoch = row, epoch
            took_s = self._clock() - began_s
            known.winners_due_s = began_s + max(WINNERS_EVERY_S, took_s / WINNERS_SHARE)


def _winners(store: Store, job_id: str, fabric_id: str) -> WinnerTable | None:
    decisions = store.decisions(job_id)
    current = set(since_takeover(decisions))
    ran = decisions_that_ran(decisions, store.highest_epoch(job_id))
    in_force = settled_decisions(one for one in ran if one in current)
    here, everywhere = (medians(statistics(store, fabric_id, of)) for of in (job_id, None))
    return winner_table(in_force, lambda decision: compare(decision, here, everywhere)) if in_force else None
