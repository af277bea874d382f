"""Our own traces joined over their ranks, as the daemon joins a running job's records.

Files are read side by side in pieces, so that no whole file is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ....store.errors import TraceError
from ....store.records import Source, TimingSource
from ....store.trace_format import TraceHeader
from ....store.wire import FLAG_TIMED
from ...join import Joiner, measurements_of
from ..left_out import LeftOut
from ..measuring import Portion, UserFacts, placed
from ..records import Block, Summary
from .jobs import RankFile, copy_note, read_header, starts_of_jobs

WAITING_RECORDS: Final = 100_000
"""Records read ahead, of all ranks together: well below the number at which the joiner gives up."""

ReadBlocks = Callable[[Path], Iterator[Block]]
"""The records of one file."""


def portions(paths: Sequence[Path], read: ReadBlocks, user_facts: UserFacts, summary: Summary) -> Iterator[Portion]:
    """Measurements of each job with files among `paths`: one row per collective, in blocks of a few thousand.

    Damaged files are counted and named; TraceError if no file can be read.
    """
    damage = _Damage(len(paths), summary)
    for starts in _jobs(paths, read, damage, summary).values():
        for streams in starts:
            header = streams[0].header
            if len(streams) < header.n_ranks:
                summary.note(
                    f"files of {len(streams)} of {header.n_ranks} ranks of job {header.job_id}: times may include"
                    " waiting for the others"
                )
            for observed in _joined(streams, damage, summary):
                rows = measurements_of(observed)
                summary.skip(LeftOut.impossible_value, len(observed) - len(rows))
                rows["source"] = Source.imported
                rows = placed(rows, user_facts, summary)
                _note_unused(user_facts, summary)
                if len(rows):
                    yield Portion(rows, header.job_id or None, header.fabric_id or None, header.fabric, header.n_ranks)


def _note_unused(user_facts: UserFacts, summary: Summary) -> None:
    for option, value in (("--setting", user_facts.setting), ("--default", user_facts.is_default)):
        if value:
            summary.note(f"the trace says what ran and what was NCCL's own choice: {option} was not used")


class _Damage:
    """Counts the files that cannot be read; if none can, raises the last one's reason."""

    def __init__(self, n_files: int, summary: Summary) -> None:
        self._n_whole = n_files
        self._summary = summary

    def take(self, error: TraceError) -> None:
        """Count and name one file."""
        self._n_whole -= 1
        if not self._n_whole:
            raise error
        self._summary.skip(LeftOut.damaged_file)
        self._summary.fault(error.problem)


class _Stream:
    """One rank's file, read a piece at a time."""

    def __init__(self, header: TraceHeader, blocks: Iterator[Block]) -> None:
        self.header = header
        self.progress = (0, 0)
        """Nanoseconds since its first record, and records read; the stream with the lowest value is read next."""
        self._blocks = blocks
        self._rest: Block | None = None
        self._first_ns: int | None = None

    def take(self, n_records: int) -> Block | None:
        """The next piece; None at the end."""
        if self._rest is None:
            self._rest = next(self._blocks, None)
        if self._rest is None:
            return None
        piece, rest = self._rest[:n_records], self._rest[n_records:]
        self._rest = rest if len(rest) else None
        last_ns = int(piece["start_ns"][-1])
        self._first_ns = last_ns if self._first_ns is None else self._first_ns
        self.progress = (last_ns - self._first_ns, self.progress[1] + len(piece))
        return piece


def _jobs(paths: Sequence[Path], read: ReadBlocks, damage: _Damage, summary: Summary) -> dict[str, list[list[_Stream]]]:
    """By job, the files of each of its starts."""
    files = []
    for path in paths:
        try:
            files.append(RankFile(path, _header(path, read)))
        except TraceError as error:
            damage.take(error)
    jobs = starts_of_jobs(files, lambda copy, first: summary.note(copy_note(copy, first)))
    return {
        job_id: [[_Stream(file.header, read(file.path)) for file in start] for start in starts]
        for job_id, starts in jobs.items()
    }


def _header(path: Path, read: ReadBlocks) -> TraceHeader:
    try:
        return read_header(path)
    except TraceError:
        next(read(path), None)  # gives a clearer message for a file with our suffix
        raise


def _joined(streams: list[_Stream], damage: _Damage, summary: Summary) -> Iterator[Block]:
    joiner, n_reporters = Joiner(), len(streams)
    n_records = max(1, WAITING_RECORDS // n_reporters)
    open_streams = list(streams)
    n_rounds = 0
    while open_streams:
        stream = min(open_streams, key=lambda one: one.progress)
        try:
            piece = stream.take(n_records)
        except TraceError as error:
            damage.take(error)
            n_reporters = max(1, n_reporters - 1)
            joiner.members_changed()
            open_streams.remove(stream)
            continue
        if piece is None:
            open_streams.remove(stream)
            summary.n_files += 1
            continue
        _count_untimed(piece, summary)
        joiner.add(stream.header.rank, piece)
        n_rounds += 1
        if n_rounds % len(open_streams) == 0:
            yield from _complete(joiner, n_reporters, summary, give_up=False)
    yield from _complete(joiner, n_reporters, summary, give_up=True)
    summary.skip(LeftOut.partial_ranks, joiner.n_partial)
    summary.skip(LeftOut.late_or_twice, joiner.n_late)


def _complete(joiner: Joiner, n_reporters: int, summary: Summary, *, give_up: bool) -> Iterator[Block]:
    observed, n_joined = joiner.join(0.0, n_reporters, give_up=give_up)  # no clock: a file has no late records
    summary.n_joined += n_joined
    if len(observed):
        yield observed


def _count_untimed(piece: Block, summary: Summary) -> None:
    """Count the records without a time, which the joiner drops."""
    timed = ((piece["flags"] & FLAG_TIMED) != 0) & (piece["duration_us"] >= 0)
    enqueued = timed & (piece["timing_source"] == TimingSource.cpu_collective)
    summary.skip(LeftOut.no_duration, int((~timed).sum()))
    summary.skip(LeftOut.enqueue_time, int(enqueued.sum()))
