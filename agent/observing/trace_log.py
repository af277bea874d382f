"""Writes a rank's observations and steps to a trace file (store/trace_format.py has the format).

Called by the drain thread only, never by the training thread. Nothing here raises. At the first error, which is logged,
the file is truncated to its last whole member, and later records count as lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...store.records import StepRecord
from ...store.trace_format import (
    STEP_FIELDS,
    TRACE_FORMAT,
    TRACE_SUFFIX,
    TRACE_VERSION,
    RecordBlock,
    StepBlock,
    TraceEnd,
    TraceHeader,
    TraceMember,
    pack_member,
)
from ...store.wire import OBSERVATION_FIELDS

_log = logging.getLogger("zerotune")

RECORD_DTYPE: Final = np.dtype(OBSERVATION_FIELDS)
STEP_DTYPE: Final = np.dtype(STEP_FIELDS)
MAX_BLOCK_RECORDS: Final = 16384
"""Largest number of records in one member, a megabyte before packing."""
FLUSH_INTERVAL_S: Final = 1.0
"""Records that have waited longer than this are written: `kill -9` loses about a second at most."""


class TraceLog:
    """One trace file in `directory`, created at once and then only appended to."""

    def __init__(
        self,
        directory: Path,
        *,
        job_id: str,
        rank: int,
        n_ranks: int,
        fabric_id: str,
        fabric: dict[str, str | int | float | bool],
        version: str,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.n_records = 0
        """Records safely in the file's blocks."""
        self.n_lost = 0
        """Records that could not be written."""
        self.path: Path | None = None
        self._clock_s = clock_s
        self._flushed_at_s = clock_s()
        self._records: list[np.ndarray[Any, Any]] = []
        self._steps: list[StepRecord] = []
        self._n_waiting = 0
        self._n_dropped = 0
        self._length_bytes = 0
        self._file: int | None = None
        header = TraceHeader(
            format=TRACE_FORMAT,
            version=TRACE_VERSION,
            job_id=job_id,
            rank=rank,
            n_ranks=n_ranks,
            fabric_id=fabric_id,
            fabric=fabric,
            clock="emulated" if fabric.get("emulated") else "device",
            started_at_s=time.time(),
            written_by=f"zerotune {version}",
        )
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file, self.path = _create(directory, f"{_file_safe(job_id)}.rank{rank:05d}")
        except OSError as error:
            _log.warning("zerotune: no trace is logged: %s", error)
            return
        self._append(header)

    def record(self, block: np.ndarray[Any, Any], *, n_dropped: int = 0) -> None:
        """Log `block`, observations [n] of `OBSERVATION_FIELDS`; it is copied.

        `n_dropped`: records that the rings have lost since the job began.
        """
        self._n_dropped = n_dropped
        if len(block):
            self._records.append(np.array(block, dtype=RECORD_DTYPE))
            self._n_waiting += len(block)
        self._flush_when_due()

    def steps(self, steps: Sequence[StepRecord]) -> None:
        """Log finished steps of this rank."""
        self._steps.extend(steps)
        self._flush_when_due()

    def flush(self) -> None:
        """Write what is waiting."""
        self._flushed_at_s = self._clock_s()
        if self._records:
            waiting = np.concatenate(self._records)
            self._records, self._n_waiting = [], 0
            for first in range(0, len(waiting), MAX_BLOCK_RECORDS):
                self._append_records(waiting[first : first + MAX_BLOCK_RECORDS])
        if self._steps:
            steps, self._steps = self._steps, []
            self._append(StepBlock(len(steps), _columns(_step_array(steps))))

    def close(self) -> None:
        """Write the rest and the end mark."""
        if self._file is None:
            return
        self.flush()
        self._append(TraceEnd(self.n_records, self._n_dropped + self.n_lost))
        self._stop()

    def _flush_when_due(self) -> None:
        overdue = self._clock_s() - self._flushed_at_s >= FLUSH_INTERVAL_S
        if overdue or self._n_waiting >= MAX_BLOCK_RECORDS:
            self.flush()

    def _append_records(self, block: np.ndarray[Any, Any]) -> None:
        if self._append(RecordBlock(len(block), _columns(block), self._n_dropped)):
            self.n_records += len(block)
        else:
            self.n_lost += len(block)

    def _append(self, message: TraceMember) -> bool:
        if self._file is None:
            return False
        try:
            rest = memoryview(pack_member(message))
            length_bytes = len(rest)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            _log.warning("zerotune: the trace ends early, %s: %s", self.path, error)
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._length_bytes)
            self._stop()
            return False
        self._length_bytes += length_bytes
        return True

    def _stop(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


def _create(directory: Path, stem: str) -> tuple[int, Path]:
    """A new file: a restarted rank never appends to, or replaces, an earlier trace. It describes the model: 0600."""
    attempt = 0
    while True:
        suffix = f".{attempt}" if attempt else ""
        path = directory / f"{stem}{suffix}{TRACE_SUFFIX}"
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600), path
        except FileExistsError:
            attempt += 1


def _file_safe(job_id: str) -> str:
    return re.sub(r"[^\w-]", "_", job_id)[:100]


def _columns(block: np.ndarray[Any, Any]) -> dict[str, bytes]:
    return {name: _byte_planes(block[name]) for name in block.dtype.names or ()}


def _byte_planes(column: np.ndarray[Any, Any]) -> bytes:
    """The lowest byte of every value, then the next byte of every value, and so on."""
    values = np.ascontiguousarray(column)
    return values.view(np.uint8).reshape(len(values), -1).T.tobytes()


def _step_array(steps: Sequence[StepRecord]) -> np.ndarray[Any, Any]:
    nan = float("nan")
    rows = [
        (
            step.step,
            step.epoch,
            step.duration_us,
            nan if step.exposed_us is None else step.exposed_us,
            nan if step.memory_pressure is None else step.memory_pressure,
        )
        for step in steps
    ]
    return np.array(rows, dtype=STEP_DTYPE)
