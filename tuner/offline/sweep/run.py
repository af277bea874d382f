"""The sweep: visits points, records samples at once, survives settings that hang."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....agent.nccl import catalog
from ....agent.nccl import fabric as fabrics
from ....agent.nccl.release import release
from ....store.errors import UserError
from ....store.records import BASELINE, Candidate, Collective, CommunicatorClass, Outcome, Phase, Source
from ....store.sqlite.database import MEASUREMENT, UNKNOWN, Store
from ....store.sqlite.rows.measurements import candidate_of
from ...modeling.cost_prior import CostPrior
from ...modeling.trainer import load_correction
from .broken import leave_out
from .grid import MIN_REPEATS, GridPoint, Place, make_grid, message_sizes, restore
from .protocol import Measure, MeasuredCalls, Ready
from .request import MAX_STARTS, SweepRequest, check
from .result import SweepResult, rows_of
from .strategy import LOOK_REPEATS, Active, FullGrid, Strategy
from .unvisited import unvisited
from .workers import GroupFailure, WorkerGroup, joined_us

Array = NDArray[Any]


Progress = Callable[[int, int, str], None]
"""Called with (done, total, name of the current point)."""


def run_sweep(request: SweepRequest, store_path: Path, progress: Progress) -> SweepResult:
    """Measure and record. Ctrl-C ends the sweep early and keeps the samples.

    Raises:
        UserError: this machine cannot run the request, or the workers do not start.
    """
    collectives = check(request)
    with Store.open(store_path) as store:
        return _Sweep(request, collectives, store, progress).run()


class _Sweep:
    """State of one sweep."""

    def __init__(
        self, request: SweepRequest, collectives: Sequence[Collective], store: Store, progress: Progress
    ) -> None:
        self._request, self._collectives = request, collectives
        self._store, self._progress = store, progress
        self._job_id = _free_name(time.strftime("sweep-%Y%m%d-%H%M%S"), {job.job_id for job in store.jobs()})
        self._is_recorded = False
        self._epoch = 0
        self._n_samples = 0
        self._visited: set[int] = set()
        self._points: list[GridPoint] = []
        self._group: WorkerGroup | None = None

    def run(self) -> SweepResult:
        """Run the whole sweep."""
        request = self._request
        began_s = time.monotonic()
        interrupted = gave_up = False
        n_restored = 0
        strategy: Strategy | None = None
        ready = ready_emulated(request, self._collectives) if request.fabric is not None else self._start()
        try:
            communicator = CommunicatorClass(request.n_ranks, ready.n_nodes)
            sizes_bytes = message_sizes(request.min_bytes, request.max_bytes, request.n_ranks)
            if request.chunk_sizes and not ready.asks_chunk_size:
                raise UserError("this NCCL asks for no chunk sizes", "leave --chunk-bytes out, or use 2.30 or newer")
            self._points = make_grid(
                self._collectives, sizes_bytes, communicator, ready.max_channels, ready.cells, request.chunk_sizes
            )
            if not request.fresh:
                n_restored += restore(self._points, _of(self._store, ready.fabric_id, communicator))
            leave_out(self._points)
            strategy = self._strategy(communicator, ready)
            if not any(strategy.progress()):
                problem = f"a budget of {request.budget:g} allows no sample of these {len(self._points):,} settings"
                raise UserError(problem, "use a larger --samples-share")
            gave_up = not self._visit_all(strategy, ready, communicator)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._stop(in_good_order=not interrupted)
            if self._is_recorded:
                self._store.update_job(self._job_id, ended_at_s=time.time())
            self._store.flush()
        choices = strategy.choices() if strategy is not None else {}
        if interrupted or gave_up:  # predictions alone are no result
            choices = {place: choice for place, choice in choices.items() if _is_compared(self._points, place)}
        return SweepResult(
            job_id=self._job_id if self._is_recorded else "",
            fabric_id=ready.fabric_id,
            emulated=str(ready.fabric.get("emulated", "")),
            n_ranks=request.n_ranks,
            n_nodes=ready.n_nodes,
            n_cells=len(self._points),
            n_places=len({point.place for point in self._points}),
            n_visited=len(self._visited),
            n_samples=self._n_samples,
            n_restored=n_restored,
            n_broken=sum(point.outcome is not Outcome.ok and not point.is_left_out for point in self._points),
            n_left_out=sum(point.is_left_out for point in self._points),
            n_unsettled=len(strategy.unsettled()) if strategy is not None else 0,
            wall_s=time.monotonic() - began_s,
            interrupted=interrupted,
            gave_up=gave_up,
            rows=tuple(rows_of(self._points, request.n_ranks, choices)),
            unvisited=tuple(
                unvisited(self._points, self._visited, strategy, request.precision, was_cut=interrupted or gave_up)
                if strategy is not None
                else ()
            ),
        )

    def _strategy(self, communicator: CommunicatorClass, ready: Ready) -> Strategy:
        request = self._request
        if request.full:
            return FullGrid(self._points, request.precision, request.max_repeats)
        correction, _ = load_correction(self._store, ready.fabric_id)
        costs = CostPrior(ready.fabric)
        for name, tables in ready.costs.items():
            for nbytes, table in tables.items():
                costs.learn_live(communicator, Collective[name], nbytes, np.array(table, np.float32))
        costs.learn_channels(communicator, ready.max_channels)
        return Active(
            self._points, communicator, costs, correction, request.precision, request.max_repeats, request.budget
        )

    def _visit_all(self, strategy: Strategy, ready: Ready, communicator: CommunicatorClass) -> bool:
        """Visit all points; returns whether the sweep was completed. It gives up if too many settings hang or fail."""
        n_starts = 0
        while visits := strategy.next_round():
            for point in visits:
                if point.is_left_out:
                    continue
                place = point.place
                self._progress(
                    *strategy.progress(), f"{place.collective.name} {place.message_bytes:,} {point.candidate}"
                )
                if self._group is None:
                    n_starts += 1
                    if n_starts > MAX_STARTS:
                        return False
                    self._start()
                self._visit(point, ready, communicator)
        self._progress(*strategy.progress(), "done")
        return True

    def _visit(self, point: GridPoint, ready: Ready, communicator: CommunicatorClass) -> None:
        """Measure one batch of `point` and record it at once."""
        assert self._group is not None
        self._epoch += 1
        is_first = id(point) not in self._visited
        self._visited.add(id(point))
        command = Measure(
            epoch=self._epoch,
            collective=point.place.collective,
            message_bytes=point.place.message_bytes,
            candidate=point.candidate,
            n_warmup=1,
            n_repeats=MIN_REPEATS if self._request.full else LOOK_REPEATS,
            check=is_first and self._request.check,
        )
        try:
            ranks = self._group.measure(command, self._request.timeout_s)
        except GroupFailure as failure:
            point.outcome, point.reason = failure.outcome, failure.reason
            self._stop(in_good_order=False)
            self._record(ready, point, [_broken_row(point, communicator)])
            leave_out(self._points)
            return
        fresh_us = joined_us(ranks)
        wrong = "" if all(one.is_correct for one in ranks) else "the result was wrong"
        if wrong := wrong or _refused(point.candidate, ranks[0]):
            point.outcome, point.reason = Outcome.failed, wrong
            self._record(ready, point, [_broken_row(point, communicator)])
            leave_out(self._points)
            return
        if point.candidate == BASELINE:
            point.ran = candidate_of(ranks[0].algorithm, ranks[0].protocol, ranks[0].n_channels)
        outliers = point.outliers(fresh_us)
        rows = []
        for duration_us, is_outlier in zip(fresh_us, outliers, strict=True):
            row = _row(point, communicator, Outcome.outlier if is_outlier else Outcome.ok)
            row["duration_us"], row["epoch"] = duration_us, self._epoch
            row["algorithm"], row["protocol"] = ranks[0].algorithm, ranks[0].protocol
            row["n_channels"], row["timing_source"] = ranks[0].n_channels, ranks[0].timing_source
            rows.append(row)
        point.duration_us += fresh_us
        self._n_samples += len(fresh_us)
        self._record(ready, point, rows)

    def _record(self, ready: Ready, point: GridPoint, rows: list[Array]) -> None:
        """Commit one visit, so that a kill loses at most the next one. A sweep without visits leaves no job."""
        if not self._is_recorded:
            self._is_recorded = True
            self._store.record_job(self._job_id, ready.fabric_id, ready.fabric, self._request.n_ranks)
        self._store.record_measurements(ready.fabric_id, self._job_id, np.array(rows, MEASUREMENT))
        self._store.commit()

    def _start(self) -> Ready:
        request, asks = self._request, bool(self._request.chunk_sizes)
        self._group = WorkerGroup(request.n_ranks, request.fabric, self._collectives, asks_chunk_size=asks)
        return self._group.ready

    def _stop(self, *, in_good_order: bool) -> None:
        if self._group is not None:
            if in_good_order:
                self._group.stop()
            self._group.kill()
            self._group = None


def _is_compared(points: Sequence[GridPoint], place: Place) -> bool:
    """Whether NCCL's own choice and another setting were measured at a place."""
    seen = [point.candidate for point in points if point.place == place and point.is_seen]
    return BASELINE in seen and len(seen) > 1


def _free_name(name: str, taken: set[str]) -> str:
    """`name`, with a number appended if a job has it already."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(one for one in names if one not in taken)


def ready_emulated(request: SweepRequest, collectives: Sequence[Collective]) -> Ready:
    """The workers' report for an emulated fabric, which needs no workers."""
    fabric = fabrics.load(request.fabric or "")
    communicator = fabric.communicator(range(request.n_ranks))
    return Ready(
        n_nodes=communicator.n_nodes,
        max_channels=fabric.max_channels(communicator),
        cells={
            collective.name: tuple((int(a), int(p)) for a, p in fabric.cells(communicator, collective))
            for collective in collectives
        },
        fabric_id=fabric.fabric_id,
        fabric=fabric.describe(),
        asks_chunk_size=release(os.environ).tuner_abi >= catalog.ASKS_CHUNK_SIZE_SINCE,
    )


def _of(store: Store, fabric_id: str, communicator: CommunicatorClass) -> Array:
    """Earlier sweeps' records for this communicator class."""
    found = store.measurements(fabric_id=fabric_id, source=Source.sweep, chunk_bytes=None)
    is_same = (found["n_ranks"] == communicator.n_ranks) & (found["n_nodes"] == communicator.n_nodes)
    matching: Array = found[is_same]
    return matching


def _refused(asked: Candidate, ran: MeasuredCalls) -> str:
    """The setting that NCCL ran instead, in words; empty if it ran the requested one, even on fewer channels."""
    setting = candidate_of(ran.algorithm, ran.protocol, ran.n_channels)
    is_known = setting.algorithm is not None and setting.protocol is not None
    if asked == BASELINE or not is_known or (setting.algorithm, setting.protocol) == (asked.algorithm, asked.protocol):
        return ""
    return f"NCCL refused it and ran {setting}"


def _row(point: GridPoint, communicator: CommunicatorClass, outcome: Outcome) -> Array:
    row = np.zeros((), MEASUREMENT)
    row["n_ranks"], row["n_nodes"] = communicator.n_ranks, communicator.n_nodes
    row["message_bytes"], row["collective"] = point.place.message_bytes, point.place.collective
    row["phase"], row["memory_pressure"] = Phase.other, math.nan
    row["is_default"], row["source"], row["outcome"] = point.candidate == BASELINE, Source.sweep, outcome
    row["chunk_bytes"] = point.candidate.chunk_bytes
    return row


def _broken_row(point: GridPoint, communicator: CommunicatorClass) -> Array:
    """A row for a setting that failed: the requested setting, without a duration."""
    row = _row(point, communicator, point.outcome)
    asked = point.candidate
    row["algorithm"] = UNKNOWN if asked.algorithm is None else asked.algorithm
    row["protocol"] = UNKNOWN if asked.protocol is None else asked.protocol
    row["n_channels"] = asked.n_channels
    return row
