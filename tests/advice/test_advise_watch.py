"""A running job is told what would pay: from its own steps and memory, and only when that changes."""

from __future__ import annotations

import pytest

from zerotune.store.errors import UserError
from zerotune.store.records import StepRecord
from zerotune.store.sqlite.database import Store
from zerotune.tuner.advice.constants import DEFAULT
from zerotune.tuner.advice.hardware.clusters import cluster
from zerotune.tuner.advice.models.model_shape import from_parameters
from zerotune.tuner.advice.prediction.memory import memory_of
from zerotune.tuner.advice.prediction.step import step_parts
from zerotune.tuner.advice.problem import Problem, Software, ZeroConfiguration
from zerotune.tuner.offline.advise.watch import alternatives, watch
from zerotune.tuner.offline.jobs.listing import list_jobs

PROBLEM = Problem(
    shape=from_parameters(3e9), cluster=cluster("p4d", 4, DEFAULT), software=Software(), constants=DEFAULT
)
RUNS = ZeroConfiguration(stage=3, micro_batch=1, recompute="full", prefetch=0)


def changes(problem, running) -> set[str]:
    return {one.change for one in alternatives(problem, running)}


def steps(n, problem=PROBLEM, running=RUNS, pressure=0.3, first=0):
    parts = step_parts(problem, running)
    return [StepRecord(first + place, 0, 1e6 * parts.total_s, 1e6 * parts.exposed_s, pressure) for place in range(n)]


def test_faster_alternatives_are_named_and_fit():
    found = alternatives(PROBLEM, RUNS)
    assert {one.change for one in found} >= {"batch", "prefetch", "recompute"}
    for one in found:
        assert one.memory_share <= 1
        assert one.gain.low < one.gain.expected < one.gain.high
        assert one.gain.expected >= 0.01
        assert memory_of(PROBLEM, one.configuration).total_bytes > 0


def test_news_come_when_something_changed_and_end_with_the_job(tmp_path):
    path = tmp_path / "s.db"
    acts = iter(
        [
            lambda store: store.record_steps("job", steps(5)),  # too few
            lambda store: store.record_steps("job", steps(60)),
            lambda store: store.record_steps("job", steps(60, first=60)),  # as before
            lambda store: store.record_steps("job", steps(600, pressure=0.9, first=120)),  # memory has filled
            lambda store: store.update_job("job", ended_at_s=1e9),
        ]
    )

    with Store.open(path) as store:

        def sleep(seconds):
            next(acts)(store)
            store.flush()

        store.record_job("job", "fabric", {}, 32)
        store.record_steps("job", steps(1))
        store.flush()
        news = list(watch(PROBLEM, path, None, RUNS, sleep))
    assert [one.step for one in news] == [59, 719]
    assert "batch" in {one.change for one in news[0].alternatives}
    assert "batch" in news[1].withdrawn
    assert "batch" not in {one.change for one in news[1].alternatives}
    assert next(acts, None) is None


def test_a_job_that_ended_early_is_refused(tmp_path):
    path = tmp_path / "s.db"
    with Store.open(path) as store:
        store.record_job("job", "fabric", {}, 32)
        store.record_steps("job", steps(3))
        store.update_job("job", ended_at_s=1e9)
        store.flush()
    with pytest.raises(UserError) as refused:
        list(watch(PROBLEM, path, None, RUNS))
    (line,) = list_jobs(path, limit=1)
    assert f" {line.n_steps} " in str(refused.value), "counted as in the list of jobs"


def test_without_a_daemon_nobody_waits_for_steps_to_come(tmp_path):
    path = tmp_path / "s.db"
    with Store.open(path) as store:
        store.record_job("job", "fabric", {}, 32)
        store.record_steps("job", steps(3))
        store.flush()
    with pytest.raises(UserError, match="daemon"):
        list(watch(PROBLEM, path, None, RUNS, lambda _: pytest.fail("it waits")))
