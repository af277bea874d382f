"""Sends a daemon's measurements to the fleet: collects them in memory, and writes them on a separate thread.

`measured` only queues, and drops rows beyond the limit. If the URL is slow or fails, nothing else waits for it: the
node works from its own store, and lost rows are counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...store.records import Outcome, Source
from ...store.wire import FleetState
from .objects import MAX_TEXT, Fabric, pack
from .signing import Signer
from .storage import Storage, shown

_log = logging.getLogger("zerotune.fleet")

WRITE_EVERY_S: Final = 60.0
"""Time of collecting rows: a thousand nodes then write 17 objects a second."""
ROWS_PER_OBJECT: Final = 200_000
"""Number of rows that are written at once."""
MAX_WAITING_ROWS: Final = 500_000
"""Most rows in memory, some 30 MB; further rows are lost."""
FIRST_RETRY_S: Final = 1.0
LAST_RETRY_S: Final = 300.0
CLOSE_S: Final = 5.0
"""Time to write waiting rows when the daemon ends."""


class _Rows(NamedTuple):
    fabric: Fabric
    job_id: str
    block: NDArray[np.void]


class FleetWriter:
    """Owns thread `zerotune-fleet`: writes below one URL; `measured`, for any thread, never blocks or raises.

    The signer's key identifies the contributor: a machine always uses the same key. The clock gives seconds since the
    epoch.
    """

    def __init__(
        self,
        storage: Storage,
        contributor: str,
        signer: Signer,
        clock: Callable[[], float] = time.time,
        write_every_s: float = WRITE_EVERY_S,
    ) -> None:
        self._storage = storage
        self._contributor = contributor[:MAX_TEXT]
        self._signer = signer
        self._clock = clock
        self._write_every_s = write_every_s
        self._changed = threading.Condition()
        self._waiting: deque[_Rows] = deque()
        self._n_waiting = self._n_written = self._n_objects = self._n_lost = 0
        self._error, self._failed_at_s = "", 0.0
        self._is_failing = self._closing = False
        self._thread = threading.Thread(target=self._run, name="zerotune-fleet", daemon=True)
        self._thread.start()

    @property
    def state(self) -> FleetState:
        """State of writing, for `zerotune status`."""
        with self._changed:
            return FleetState(
                url=shown(self._storage.url),
                contributor=self._contributor,
                key=self._signer.public_hex,
                n_objects=self._n_objects,
                n_written=self._n_written,
                n_waiting=self._n_waiting,
                n_lost=self._n_lost,
                is_failing=self._is_failing,
                error=self._error,
                failed_s_ago=time.monotonic() - self._failed_at_s if self._error else 0.0,
            )

    def measured(
        self, fabric_id: str, facts: Mapping[str, str | int | float | bool], job_id: str, block: NDArray[np.void]
    ) -> None:
        """Queue this node's measurements (MEASUREMENT, shape (n,), copied) of a job."""
        is_shared = (block["source"] == Source.live) & (block["outcome"] == Outcome.ok)
        block = block[is_shared & (block["chunk_bytes"] == 0)]  # objects have no chunk sizes
        with self._changed:
            room = MAX_WAITING_ROWS - self._n_waiting
            if len(block) > room:
                self._n_lost += len(block) - room
                block = block[:room]
            if len(block):
                self._waiting.append(_Rows(Fabric(fabric_id, facts), job_id, block.copy()))
                self._n_waiting += len(block)
                if self._n_waiting >= ROWS_PER_OBJECT:
                    self._changed.notify_all()

    def close(self) -> None:
        """Write waiting rows for at most CLOSE_S; the rest is lost. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        with self._changed:
            n_left, self._n_waiting = self._n_waiting, 0
            self._n_lost += n_left
            self._waiting.clear()
        if n_left:
            _log.warning("%d measurements were not written to %s: %s", n_left, shown(self._storage.url), self._error)

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            with self._changed:
                wait_s = retry_s if self._is_failing else self._write_every_s
                self._changed.wait_for(lambda: self._closing or self._has_enough(), wait_s)
                is_last = self._closing
            is_written = self._write_all()
            retry_s = FIRST_RETRY_S if is_written else min(2 * retry_s, LAST_RETRY_S)
            if is_last:
                return

    def _has_enough(self) -> bool:
        return not self._is_failing and self._n_waiting >= ROWS_PER_OBJECT

    def _write_all(self) -> bool:
        """Write waiting rows object by object; False if one could not be written."""
        while rows := self._next_rows():
            n_rows = sum(len(one.block) for one in rows)
            try:
                job_ids = list(dict.fromkeys(one.job_id for one in rows))
                job = np.repeat([job_ids.index(one.job_id) for one in rows], [len(one.block) for one in rows])
                block = np.concatenate([one.block for one in rows])
                at_s = int(self._clock())
                self._storage.put(*pack(self._contributor, rows[0].fabric, job_ids, job, block, at_s, self._signer))
            except Exception as error:  # of any library below fsspec
                self._failed(rows, n_rows, error)
                return False
            self._written(n_rows)
        return True

    def _next_rows(self) -> list[_Rows]:
        """Waiting rows of one fabric, up to an object's limit."""
        rows: list[_Rows] = []
        n_rows = 0
        with self._changed:
            while self._waiting and (not rows or self._waiting[0].fabric.fabric_id == rows[0].fabric.fabric_id):
                if rows and n_rows + len(self._waiting[0].block) > ROWS_PER_OBJECT:
                    break
                rows.append(self._waiting.popleft())
                n_rows += len(rows[-1].block)
        return rows

    def _written(self, n_rows: int) -> None:
        with self._changed:
            was_failing, self._is_failing = self._is_failing, False
            self._n_waiting = max(0, self._n_waiting - n_rows)
            self._n_written += n_rows
            self._n_objects += 1
        if was_failing:
            _log.warning("%s is written again", shown(self._storage.url))

    def _failed(self, rows: list[_Rows], n_rows: int, error: Exception) -> None:
        """Put rows back to the front, for the next attempt."""
        with self._changed:
            was_failing, self._is_failing = self._is_failing, True
            self._error = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if not was_failing:
                self._failed_at_s = time.monotonic()
            if self._n_waiting:  # otherwise the daemon has ended meanwhile
                self._waiting.extendleft(reversed(rows))
        if not was_failing:
            _log.warning(
                "%s cannot be written, this node works for itself meanwhile: %s", shown(self._storage.url), self._error
            )
