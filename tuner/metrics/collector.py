"""The daemon's status and the store's measurements as Prometheus metrics."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector as Base

from ...store.errors import StoreError, UntrustedError
from ...store.records import Algorithm, Collective, Phase, Protocol
from ...store.sqlite.database import UNKNOWN
from ...store.sqlite.reading.new_measurements import NewMeasurement, NewMeasurements
from ...store.wire import StatusReply
from ..client.status import fetch_status

JOB_LABEL: Final = "zerotune_job"
"""The label is not `job`, since Prometheus reserves that word and would rename ours to `exported_job`."""
COLLECTIVE_LABELS: Final = (JOB_LABEL, "collective", "phase", "algorithm", "protocol")
BUCKETS_US: Final = tuple(round(10 * 2 ** (step / 2), 1) for step in range(37))
"""10 us to 2.6 s, two per octave."""
STATUS_AGE_S: Final = 1.0
STATUS_TIMEOUT_S: Final = 2.0
MAX_LABEL_SETS: Final = 2000
"""Further label combinations count under the job `other`, since Prometheus never forgets one."""

Labels = tuple[str, ...]


class _Spread:
    """Durations of one combination of labels."""

    __slots__ = ("counts", "n_bytes", "sum_us")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_US) + 1)
        self.sum_us = 0.0
        self.n_bytes = 0


class Collector(Base):
    """Collects on request; safe for concurrent scrapes."""

    def __init__(
        self,
        endpoint: str,
        store_path: Path,
        *,
        from_start: bool = False,
        curve_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`from_start` also counts the store's old measurements; otherwise counters begin with this process."""
        self._endpoint, self._store_path, self._curve_dir = endpoint, store_path, curve_dir
        self._clock = clock
        self._last_row: int | None = 0 if from_start else None
        self._lock = threading.Lock()
        self._status: StatusReply | None = None
        self._asked_at_s = -STATUS_AGE_S
        self._spreads: dict[Labels, _Spread] = {}
        if not from_start:
            self._read_store()

    def describe(self) -> Iterator[Metric]:
        """Return no descriptions: prometheus_client would have to collect to get them."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All metrics, without those that cannot be read now; `zerotune_up` shows whether the daemon answers."""
        with self._lock:
            self._read_store()
            status = self._current_status()
            metrics = [*_of_daemon(status), *_of_jobs(status), *self._of_collectives()]
        return iter(metrics)

    def _current_status(self) -> StatusReply | None:
        if self._clock() - self._asked_at_s >= STATUS_AGE_S:
            try:
                self._status = fetch_status(self._endpoint, STATUS_TIMEOUT_S, curve_dir=self._curve_dir)
            except UntrustedError:
                self._status = None
            self._asked_at_s = self._clock()
        return self._status

    def _read_store(self) -> None:
        """Count new measurements, over a connection of this scrape, since each thread needs its own."""
        try:
            measurements = NewMeasurements(self._store_path, self._last_row)
        except StoreError:
            self._last_row = 0  # no store yet: all its later rows are new
            return
        try:
            for block in measurements.read():
                for one in block:
                    self._count(one)
            self._last_row = measurements.last_row
        finally:
            measurements.close()

    def _count(self, one: NewMeasurement) -> None:
        labels = (
            one.job_id,
            Collective(one.collective).name,
            Phase(one.phase).name,
            "unknown" if one.algorithm == UNKNOWN else Algorithm(one.algorithm).name,
            "unknown" if one.protocol == UNKNOWN else Protocol(one.protocol).name,
        )
        if labels not in self._spreads and len(self._spreads) >= MAX_LABEL_SETS:
            labels = ("other", *labels[1:])
        spread = self._spreads.setdefault(labels, _Spread())
        spread.counts[bisect.bisect_left(BUCKETS_US, one.duration_us)] += 1
        spread.sum_us += one.duration_us
        spread.n_bytes += one.message_bytes

    def _of_collectives(self) -> Iterator[Metric]:
        durations = HistogramMetricFamily(
            "zerotune_collective_duration_seconds",
            "Measured duration of collectives, joined over ranks.",
            labels=COLLECTIVE_LABELS,
        )
        n_bytes = CounterMetricFamily(
            "zerotune_collective_bytes",
            "Message bytes of the measured collectives, total size.",
            labels=COLLECTIVE_LABELS,
        )
        for labels, spread in self._spreads.items():
            buckets: list[tuple[str, float]] = []
            n_below = 0
            for limit_us, count in zip((*BUCKETS_US, None), spread.counts, strict=True):
                n_below += count
                buckets.append(("+Inf" if limit_us is None else repr(round(limit_us / 1e6, 8)), n_below))
            durations.add_metric(labels, buckets, spread.sum_us / 1e6)
            n_bytes.add_metric(labels, spread.n_bytes)
        yield durations
        yield n_bytes


def _of_daemon(status: StatusReply | None) -> Iterator[Metric]:
    yield GaugeMetricFamily("zerotune_up", "Whether the daemon answers.", value=float(status is not None))
    if status is None:
        return
    yield GaugeMetricFamily("zerotune_daemon_uptime_seconds", "Since the daemon started.", value=status.uptime_s)
    yield GaugeMetricFamily(
        "zerotune_daemon_resident_bytes", "Memory of the daemon's process.", value=status.resident_bytes
    )
    yield CounterMetricFamily("zerotune_daemon_errors", "Failures of the daemon's own.", value=status.n_errors)
    yield CounterMetricFamily("zerotune_daemon_refused", "Bad messages and records refused.", value=status.n_refused)
    yield CounterMetricFamily("zerotune_store_lost", "Records that could not be stored.", value=status.store.n_lost)
    yield GaugeMetricFamily(
        "zerotune_store_damaged", "Whether the store's file was found damaged.", value=float(bool(status.store.damage))
    )
    yield GaugeMetricFamily(
        "zerotune_store_waiting", "Records that the store cannot take now.", value=status.store.n_waiting
    )
    yield CounterMetricFamily(
        "zerotune_fleet_written", "Measurements written for other nodes.", value=status.fleet.n_written
    )
    yield CounterMetricFamily(
        "zerotune_fleet_lost", "Measurements that could not be written for them.", value=status.fleet.n_lost
    )
    yield GaugeMetricFamily(
        "zerotune_fleet_failing", "Whether writing for them fails now.", value=float(status.fleet.is_failing)
    )


def _of_jobs(status: StatusReply | None) -> Iterator[Metric]:
    """Gauges and counters by job."""
    if status is None:
        return
    by_job = (JOB_LABEL,)
    info = GaugeMetricFamily(
        "zerotune_job_info", "1; facts in the labels.", labels=(JOB_LABEL, "name", "fabric", "stage", "health")
    )
    gauges = {
        "ranks": GaugeMetricFamily("zerotune_job_ranks", "Ranks that the job has.", labels=by_job),
        "ranks_seen": GaugeMetricFamily("zerotune_job_ranks_connected", "Ranks heard of.", labels=by_job),
        "epoch": GaugeMetricFamily("zerotune_job_epoch", "Plan in force.", labels=by_job),
        "step": GaugeMetricFamily("zerotune_job_step", "Latest step.", labels=by_job),
        "step_us": GaugeMetricFamily("zerotune_job_step_seconds", "Step time of late.", labels=by_job),
        "spent": GaugeMetricFamily(
            "zerotune_job_exploration_ratio", "Share of the step time spent on trying settings out.", labels=by_job
        ),
        "wait": GaugeMetricFamily(
            "zerotune_job_collective_wait_seconds",
            "Of a step: how long the median rank waits in collectives for the last one.",
            labels=by_job,
        ),
        "transfer": GaugeMetricFamily(
            "zerotune_job_collective_transfer_seconds",
            "Of a step: what collectives take from the last arrival on.",
            labels=by_job,
        ),
    }
    counters = {
        "observations": CounterMetricFamily("zerotune_job_observations", "Collectives observed.", labels=by_job),
        "dropped": CounterMetricFamily("zerotune_job_dropped", "Observations lost on the way.", labels=by_job),
        "explored": CounterMetricFamily("zerotune_job_explored", "Calls that ran a setting on trial.", labels=by_job),
    }
    late = GaugeMetricFamily(
        "zerotune_job_rank_late_seconds",
        "How late a persistent straggler arrives at the collectives of a step; whole nodes by their lowest rank.",
        labels=(JOB_LABEL, "rank", "node"),
    )
    slow = GaugeMetricFamily(
        "zerotune_job_communicator_slow_seconds",
        "How much longer per step a communicator takes than others that do the same.",
        labels=(JOB_LABEL, "ranks"),
    )
    for job in status.jobs:
        for one in job.lateness.late:
            late.add_metric((job.job_id, str(one.rank), one.node), one.late_us / 1e6)
        for link in job.lateness.slow:
            slow.add_metric((job.job_id, " ".join(map(str, link.ranks[:16]))), link.excess_us / 1e6)
        info.add_metric((job.job_id, job.name, job.fabric_id, job.stage.name, job.health.split(":")[0][:40]), 1)
        values = (job.n_ranks, job.n_ranks_seen, job.epoch, job.step, job.step_us / 1e6)
        waits = (job.lateness.wait_us / 1e6, job.lateness.transfer_us / 1e6)
        for gauge, value in zip(gauges.values(), (*values, job.exploration_spent_percent / 100, *waits), strict=True):
            gauge.add_metric((job.job_id,), value)
        for counter, count in zip(counters.values(), (job.n_observations, job.n_dropped, job.n_explored), strict=True):
            counter.add_metric((job.job_id,), count)
    yield info
    yield from gauges.values()
    yield from counters.values()
    yield late
    yield slow
