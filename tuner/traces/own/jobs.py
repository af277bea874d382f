"""Finds the job, start and rank of each of our own trace files.

A folder of `launch --log-trace` may have files of several jobs. Restarted ranks begin new files and count their
collectives from 0, so files of different starts of a job cannot be joined.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....store.errors import TraceError, UserError
from ....store.trace_format import TraceHeader
from .reader import iter_members


@dataclass(frozen=True)
class RankFile:
    """One rank's file of one start of a job."""

    path: Path
    header: TraceHeader


@dataclass(frozen=True)
class OneStart:
    """The files of one start of one job by rank, at most one per rank."""

    files: tuple[RankFile, ...]
    damaged: tuple[TraceError, ...]
    """Files whose headers cannot be read."""
    notes: tuple[str, ...]
    """Notes on files that were left out, with reasons."""


def read_header(path: Path) -> TraceHeader:
    """The job, start and rank of the file."""
    with contextlib.closing(iter_members(path)) as members:
        header = next(members)
    assert isinstance(header, TraceHeader)
    return header


def job_ids(paths: Iterable[Path]) -> list[str]:
    """Ids of the jobs that wrote the files, in their order; files with unreadable headers are left out."""
    found: dict[str, None] = {}
    for path in paths:
        with contextlib.suppress(TraceError):
            found[read_header(path).job_id] = None
    return list(found)


def starts_of_jobs(files: Iterable[RankFile], copied: Callable[[Path, Path], None]) -> dict[str, list[list[RankFile]]]:
    """By job id, the files of each of its starts in the order of time, by rank.

    `copied` is called with each file that has an earlier file's rank and time, and with that earlier file,
    which is used.
    """
    known: defaultdict[str, defaultdict[int, dict[float, RankFile]]] = defaultdict(lambda: defaultdict(dict))
    for file in files:
        of_rank = known[file.header.job_id][file.header.rank]
        first = of_rank.setdefault(file.header.started_at_s, file)
        if first is not file:
            copied(file.path, first.path)
    return {job_id: _starts(by_rank) for job_id, by_rank in known.items()}


def _starts(by_rank: dict[int, dict[float, RankFile]]) -> list[list[RankFile]]:
    starts: defaultdict[int, list[RankFile]] = defaultdict(list)
    for rank in sorted(by_rank):
        for number, started_at_s in enumerate(sorted(by_rank[rank])):
            starts[number].append(by_rank[rank][started_at_s])
    return [starts[number] for number in sorted(starts)]


def one_start(paths: Sequence[Path], job_id: str | None = None, likely: str = "") -> OneStart:
    """The files of one job among `paths`, from its longest start.

    The job is `job_id`; if that is None, the only one, or `likely`. Several jobs without a choice raise TraceError.

    Raises:
        UserError: no file is of `job_id`.
    """
    files: list[RankFile] = []
    damaged: list[TraceError] = []
    for path in paths:
        try:
            files.append(RankFile(path, read_header(path)))
        except TraceError as error:
            damaged.append(error)
    if not files:
        raise damaged[0]
    notes: list[str] = []
    jobs = starts_of_jobs(files, lambda copy, first: notes.append(copy_note(copy, first)))
    starts = jobs[_chosen(jobs, job_id, likely)]
    if len(starts) > 1:
        notes.append(f"the job was started {len(starts)} times: its longest start was used")
    longest = max(starts, key=lambda start: sum(file.path.stat().st_size for file in start))
    return OneStart(tuple(longest), tuple(damaged), tuple(notes))


def copy_note(copy: Path, first: Path) -> str:
    """The message about a copied file."""
    return f"left out {copy.name}: it is of the same rank and start as {first.name}"


def _chosen(jobs: dict[str, list[list[RankFile]]], job_id: str | None, likely: str) -> str:
    job_ids = sorted(jobs)
    named = ", ".join(job_ids[:5]) + (", ..." if len(job_ids) > 5 else "")
    if job_id is not None:
        if job_id not in jobs:
            raise UserError(f"no trace there is of job {job_id}", f"use one of {named}")
        return job_id
    if len(jobs) == 1:
        return job_ids[0]
    if likely in jobs:
        return likely
    raise TraceError(f"the traces are of {len(jobs)} jobs ({named})", "name one with --job")
