"""Recognises the kind of training of a trace (`zerotune explain --trace`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from ...store.errors import UserError
from ...store.records import MissingEvidence, Stage
from ...store.wire import FLAG_TIMED
from ..fingerprint.fingerprint import StageFingerprint
from ..fingerprint.labels import UNKNOWN, Shown
from ..traces.left_out import UNSIZED
from ..traces.own.jobs import OneStart, job_ids, one_start
from ..traces.own.reader import trace_files
from ..traces.records import Block, Summary

MAX_UNSIZED: Final = 0.01
"""Share of a trace's collectives that may be left out; more may be all of one kind."""
OWN_FORMAT = "zerotune"


@dataclass(frozen=True)
class Recognition:
    """A recognition's result, and each change before as (calls so far, recognised from there on)."""

    trace: str
    job_id: str
    """Job of the trace; empty if the format does not name it."""
    changes: tuple[tuple[int, Shown], ...]
    n_calls: int
    period: int
    shown: Shown
    missing_evidence: MissingEvidence
    """Why `shown` has no stage."""
    n_unsized: int = 0
    """Collectives that were left out, since the trace does not have their size or kind."""
    faults: tuple[str, ...] = ()
    """Names of damaged or truncated files."""


def read(path: Path, rank: int | None = None, job_id: str | None = None, format_name: str | None = None) -> Recognition:
    """Process one rank of a trace, or of a folder of rank files, as the daemon would.

    Args:
        rank: None: the first in the trace.
        job_id: needed if the path has our own traces of several jobs.

    Raises:
        TraceError: it is no trace, or of several jobs and `job_id` is None.
        UserError: it has no records of that rank or job.
    """
    from ..traces.trace import read_trace

    trace = read_trace(path, format_name)
    if trace.format_name == OWN_FORMAT:
        return _of_start(one_start(trace_files(path), job_id), rank, str(path))
    trace.refuse_job(job_id)
    shown = _followed(_only(trace.blocks(), rank, path), trace=str(path))
    return _unless_incomplete(shown, trace.summary)


def _unless_incomplete(reading: Recognition, summary: Summary) -> Recognition:
    """No stage if many collectives are left out: ZeRO-1 without its gathers looks like DDP, for example."""
    n_unsized = sum(n for reason, n in summary.unusable.items() if reason in UNSIZED)
    reading = replace(reading, n_unsized=n_unsized, faults=tuple(summary.faults))
    if n_unsized <= MAX_UNSIZED * (summary.n_records + n_unsized):
        return reading
    return replace(reading, changes=(), shown=UNKNOWN, missing_evidence=MissingEvidence.incomplete)


def read_several(
    paths: Sequence[Path], rank: int | None = None, job_id: str | None = None, format_name: str | None = None
) -> list[Recognition]:
    """Process one rank of each job in several traces, job after job; raises as `read` does.

    Our own files of one job belong together, whichever path they come from. Other formats do not name jobs: each of
    their paths counts as one.
    """
    from ..traces.trace import read_trace

    if len(paths) == 1:
        return [read(paths[0], rank, job_id, format_name)]
    formats = [read_trace(path, format_name).format_name for path in paths]
    own = [file for path, name in zip(paths, formats, strict=True) if name == OWN_FORMAT for file in trace_files(path)]
    others = [path for path, name in zip(paths, formats, strict=True) if name != OWN_FORMAT]
    jobs: Sequence[str | None] = [job_id] if job_id is not None else job_ids(own) or [None]
    readings = [_of_start(one_start(own, one), rank, f"job {one}") for one in jobs if own]
    return [*readings, *(read(path, rank, job_id, format_name) for path in others)]


def _of_start(start: OneStart, rank: int | None, where: str) -> Recognition:
    """The portions of this rank of the job; records only have a rank's number in a communicator."""
    from ..traces.trace import read_trace

    files = {file.header.rank: file for file in start.files}
    if rank is not None and rank not in files:
        raise _no_rank(where, rank, files)
    chosen = start.files[0] if rank is None else files[rank]
    trace = read_trace(chosen.path)
    reading = _followed(trace.blocks(), trace=str(chosen.path), job_id=chosen.header.job_id)
    return replace(reading, faults=(*(error.problem for error in start.damaged), *trace.summary.faults))


def _only(blocks: Iterator[Block], rank: int | None, path: Path) -> Iterator[Block]:
    ranks: set[int] = set()
    for block in blocks:
        if rank is None:
            rank = int(block["rank"][0])
        ranks |= set(np.unique(block["rank"]).tolist())
        yield block[block["rank"] == rank]
    if rank is not None and rank not in ranks:
        raise _no_rank(str(path), rank, ranks)


def _no_rank(where: str, rank: int, known: Iterable[int]) -> UserError:
    return UserError(f"{where} holds nothing of rank {rank}", f"use one of {', '.join(map(str, sorted(known)))}")


def _followed(blocks: Iterator[Block], trace: str, job_id: str = "") -> Recognition:
    fingerprint = StageFingerprint()
    changes: list[tuple[int, Shown]] = []
    n_calls_of: Counter[Shown] = Counter()
    for mine in blocks:
        # Imported formats have what ran, with times; a file without times has only decisions.
        for start in range(0, len(mine), 64):
            part = mine[start : start + 64].copy()
            part["flags"] = np.where(part["start_ns"] > 0, part["flags"] | FLAG_TIMED, part["flags"])
            if fingerprint.add_records(part):
                changes.append((fingerprint.n_calls, fingerprint.shown))
            if fingerprint.stage is not Stage.unknown:
                n_calls_of[fingerprint.shown] += len(part)
    shown, period = fingerprint.shown, fingerprint.calls_per_step
    if shown.stage is Stage.unknown and n_calls_of:  # training has ended, and later calls are not part of it
        shown = n_calls_of.most_common(1)[0][0]
    missing = MissingEvidence.nothing if shown.stage is not Stage.unknown else fingerprint.missing_evidence
    return Recognition(trace, job_id, tuple(changes), fingerprint.n_calls, period, shown, missing)
