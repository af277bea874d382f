"""`zerotune store export --to chrome`: a job of the store, or the ranks of its trace."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....store.counted import counted
from ....store.errors import UserError
from ....store.records import Collective, CommunicatorClass, Decision, Phase, StepRecord
from ....store.sqlite.database import Store
from ...traces.own.clocks import Span
from ...traces.own.jobs import one_start
from ...traces.own.reader import trace_files
from ..jobs.finding import id_of, job_of
from .events import EventFile, Track, event_file
from .named import by_field, collective_args, collective_name, draw_decisions, named
from .ranks import draw_ranks

Array = NDArray[Any]


def export_chrome_trace(store_path: Path, out: Path, job_id: str | None = None, trace: Path | None = None) -> list[str]:
    """Write a timeline as Chrome Trace Event JSON, compressed if `out` ends in .gz; returns remarks for the user.

    Args:
        store_path: with `trace`, only decisions are read from it, and it may be missing.
        job_id: id or name of the job; None: the newest that trained, or the only one of the trace.
        trace: draw every rank of this file or folder of `launch --log-trace`, by its own clock.

    Raises:
        UserError: there is no such job, nothing of it is recorded, or the file cannot be written.
    """
    if trace is None:
        return _export_job(store_path, out, job_id)
    start = one_start(trace_files(trace), id_of(store_path, job_id))
    decisions: list[Decision] = []
    if store_path.exists():
        with Store.open(store_path, read_only=True) as store:
            decisions = store.decisions(job_id=start.files[0].header.job_id)
    with event_file(out) as events:
        remarks = draw_ranks(events, start, decisions)
    n_ranks = counted(len(start.files), "rank")
    return [f"{counted(events.n_events, 'event')} of {n_ranks} written to {out}{_OPEN}", *remarks]


_OPEN = "; open it at https://ui.perfetto.dev or chrome://tracing."


def _export_job(store_path: Path, out: Path, job_id: str | None) -> list[str]:
    with Store.open(store_path, read_only=True) as store:
        job = job_of(store, job_id)
        steps, rows = store.steps(job.job_id), store.measurements(job_id=job.job_id, chunk_bytes=None)
        decisions = store.decisions(job_id=job.job_id)
    if not (steps or decisions or len(rows)):
        raise UserError(f"nothing of job {job.job_id} is recorded", "name another job with --job, or train longer")
    spans = _spans(steps, rows)
    with event_file(out) as events:
        pid = events.process(f"job {job.name or job.job_id}")
        track = Track(events, pid, "decisions")
        draw_decisions(track, decisions, spans, {one.epoch: one.step for one in reversed(steps)})
        track = Track(events, pid, "steps")
        for one in steps:
            begin_us, end_us = spans[one.step]
            args = {name: getattr(one, name) for name in ("step", "epoch", "exposed_us", "memory_pressure")}
            track.span(f"step {one.step}", "step", begin_us, end_us - begin_us, args)
        _draw_measurements(events, pid, rows, spans)
    return [
        f"{counted(events.n_events, 'event')} of job {job.job_id} written to {out}{_OPEN}",
        "A store has durations and no starts: in their step, collectives are drawn one after the other;"
        " a trace (--trace) has both.",
    ]


def _tracks(rows: Array) -> Array:
    """Index of each measurement's track; a track has one communicator class, collective and phase."""
    columns = [rows[name].astype(np.int64) for name in ("n_ranks", "n_nodes", "collective", "phase")]
    return np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].reshape(-1)


def _spans(steps: list[StepRecord], rows: Array) -> dict[int, Span]:
    """Begin and end of each step, without gaps; a step with measurements alone has its longest track's length."""
    recorded = {one.step: one.duration_us for one in steps}
    sums_us: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for step, track, duration_us in zip(
        rows["step"].tolist(), _tracks(rows).tolist(), rows["duration_us"].tolist(), strict=True
    ):
        if step not in recorded:
            sums_us[step][track] += duration_us
    lengths_us = recorded | {step: max(of_track.values()) for step, of_track in sums_us.items()}
    spans, now_us = {}, 0.0
    for step in sorted(lengths_us):
        spans[step] = (now_us, now_us + lengths_us[step])
        now_us += lengths_us[step]
    return spans


def _draw_measurements(events: EventFile, pid: int, rows: Array, spans: dict[int, Span]) -> None:
    tracks = _tracks(rows)
    for index in range(int(tracks.max(initial=-1)) + 1):
        chosen = rows[tracks == index]
        chosen = chosen[np.argsort(chosen["step"], kind="stable")]
        first = chosen[0]
        what = f"{named(Collective, int(first['collective']))} {named(Phase, int(first['phase']))}"
        size = CommunicatorClass(int(first["n_ranks"]), int(first["n_nodes"]))
        track = Track(events, pid, f"{what}, {size}, starts unknown")
        step, now_us = -1, 0.0
        for row in by_field(chosen):
            if row["step"] != step:
                step = row["step"]
                now_us = spans[step][0]
            args = collective_args(row, is_default=bool(row["is_default"]))
            track.span(collective_name(row), "collective", now_us, row["duration_us"], args)
            now_us += row["duration_us"]
