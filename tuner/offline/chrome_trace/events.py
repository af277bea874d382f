"""Events in the Chrome Trace Event JSON format, written one by one.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from ....store.atomic_file import users_file
from ....store.errors import printable

Args = Mapping[str, str | int | float | None]

_HEAD: Final = b'{"displayTimeUnit":"ms","traceEvents":[\n'
_TAIL: Final = b"\n]}\n"
_encode: Final = msgspec.json.Encoder().encode


class EventFile:
    """An open file of events; `n_events` leaves out metadata."""

    def __init__(self, file: IO[bytes]) -> None:
        self.n_events = 0
        self._file = file
        self._between = _HEAD
        # Each track's id is unique in the file: viewers mix up equal ids of two processes.
        self._ids = itertools.count(1)

    def process(self, name: str) -> int:
        """A new group of tracks, below the earlier ones; returns its pid."""
        pid = next(self._ids)
        self._describe("process", pid, pid, name)
        return pid

    def thread(self, pid: int, name: str) -> int:
        """A new row of process `pid`, below its earlier ones; returns its tid."""
        tid = next(self._ids)
        self._describe("thread", pid, tid, name)
        return tid

    def write(self, event: dict[str, Any], args: Args) -> None:
        """One event; names are shown without control characters, arguments that are None are left out."""
        self.n_events += 1
        known = {key: _printable(value) for key, value in args.items() if value is not None}
        self._put(event | {"name": _printable(event["name"]), "args": known})

    def close(self) -> None:
        """End the document."""
        self._file.write((b"" if self._between != _HEAD else _HEAD) + _TAIL)

    def _describe(self, kind: str, pid: int, tid: int, name: str) -> None:
        of = {"ph": "M", "ts": 0, "pid": pid, "tid": tid}
        self._put(of | {"name": f"{kind}_name", "args": {"name": _printable(name)}})
        self._put(of | {"name": f"{kind}_sort_index", "args": {"sort_index": tid}})

    def _put(self, event: dict[str, Any]) -> None:
        self._file.write(self._between + _encode(event))
        self._between = b",\n"


class SideBySide:
    """Places spans, in the order of their beginnings, in as few rows as possible without overlaps."""

    def __init__(self) -> None:
        self.n_rows = 0
        self._ends: list[tuple[float, int]] = []
        """Heap of (end of the row's last span, row)."""

    def row_of(self, begin: float, end: float) -> int:
        """The row, from 0 on, of a span that does not begin before the last one."""
        if self._ends and self._ends[0][0] <= begin:
            _, row = heapq.heappop(self._ends)
        else:
            row, self.n_rows = self.n_rows, self.n_rows + 1
        heapq.heappush(self._ends, (end, row))
        return row


class Track:
    """Spans and instants of one kind in one process, in the order of their beginnings.

    A viewer nests spans of a row only if one lies wholly within the other, so overlapping spans get
    rows of their own.
    """

    def __init__(self, events: EventFile, pid: int, name: str) -> None:
        self._events = events
        self._pid = pid
        self._name = name
        self._rows = SideBySide()
        self._tids: list[int] = []

    def span(self, name: str, category: str, begin_us: float, duration_us: float, args: Args) -> None:
        """One complete event of at least a nanosecond; it must not begin before the last one."""
        begin_ns = round(begin_us * 1e3)
        end_ns = max(round((begin_us + duration_us) * 1e3), begin_ns + 1)
        tid = self._tid(self._rows.row_of(begin_ns, end_ns))
        event = {"ph": "X", "ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3, "pid": self._pid, "tid": tid}
        self._events.write(event | {"name": name, "cat": category}, args)

    def instant(self, name: str, category: str, at_us: float, args: Args) -> None:
        """One event without a duration."""
        event = {"ph": "i", "s": "t", "ts": round(at_us, 3), "pid": self._pid, "tid": self._tid(0)}
        self._events.write(event | {"name": name, "cat": category}, args)

    def _tid(self, row: int) -> int:
        if row == len(self._tids):
            self._tids.append(self._events.thread(self._pid, f"{self._name} ({row + 1})" if row else self._name))
        return self._tids[row]


@contextmanager
def event_file(out: Path) -> Iterator[EventFile]:
    """A new file of events, compressed if its name ends in .gz; it is complete after the block, or missing."""
    with users_file(out) as partial, partial.open("wb") as raw:
        if out.suffix.lower() == ".gz":
            with gzip.GzipFile(out.stem, "wb", 6, raw) as packed, _document(packed) as events:
                yield events
        else:
            with _document(raw) as events:
                yield events


@contextmanager
def _document(file: Any) -> Iterator[EventFile]:
    events = EventFile(file)
    yield events
    events.close()


def _printable(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value
