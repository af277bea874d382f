"""The report never takes training's own pace, nor the network's, for a plan's doing."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from report_material import make_store

from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.records import (
    BASELINE,
    Collective,
    CommunicatorClass,
    Decision,
    DecisionKey,
    Phase,
    StepRecord,
    size_class,
)
from zerotune.store.sqlite.database import Store
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.offline.report import gather, write_report

KEY = DecisionKey(CommunicatorClass(2, 2), Collective.all_gather, Phase.forward_gather, size_class(16 << 10))
PACE = "training's own pace changed: steps take 2.00 times as long with the same settings"


def slowed(path: Path, news: Decision, *, since: int, factor: float = 2.0, job_id: str = "job-1") -> Path:
    """The made-up job, whose steps take `factor` times as long from `since` on, of which `news` tells."""
    if not path.exists() or all(job.job_id != job_id for job in _jobs(path)):
        make_store(path, job_id)
    with Store.open(path) as store:
        fabric_id = next(job.fabric_id for job in store.jobs() if job.job_id == job_id)
        steps = [
            msgspec.structs.replace(step, duration_us=factor * step.duration_us, exposed_us=step.exposed_us)
            for step in store.steps(job_id)
            if step.step >= since
        ]
        store.record_steps(job_id, steps)
        store.record_decisions([msgspec.structs.replace(news, job_id=job_id, fabric_id=fabric_id)])
        store.flush()
    return path


def _jobs(path: Path):
    with Store.open(path, read_only=True) as store:
        return store.jobs()


def told(kind: str, step: int | None, *, epoch: int = 7, reason: str = PACE) -> Decision:
    return Decision("", "", KEY, BASELINE, epoch, kind, reason, step=step)


@pytest.mark.parametrize("kind", ["pace", "regime"])
def test_a_bigger_batch_is_not_headlined_as_a_plans_doing(kind: str, tmp_path: Path):
    """Epoch 6 begins at step 120; twice as long from step 150 on, as it would be with twice the batch."""
    path = slowed(tmp_path / "s.db", told(kind, 153), since=150)
    found = gather(path).before_after
    change = found.changes[0]
    assert change.percent == pytest.approx(-27, abs=5), "what plans did before, by the last quarter of steps 20 to 142"
    assert (found.part.first, found.part.end) == (0, 143), "noticed at step 153"
    assert "step 153" in found.explanation
    assert "step 153, epoch 7: " in write_report(path, tmp_path / "r.html").read_text()


def test_news_that_older_versions_left_without_a_step_is_heeded_by_its_epoch(tmp_path: Path):
    path = slowed(tmp_path / "s.db", told("keep", None, reason=f"{PACE} (of the whole job)"), since=150)
    found = gather(path).before_after
    assert found.changes[0].percent == pytest.approx(-24, abs=5), "before epoch 6, in which it was noticed"
    assert found.part.end == 120


def test_a_pace_that_changed_before_the_first_plan_leaves_out_what_was_before(tmp_path: Path):
    path = slowed(tmp_path / "s.db", told("pace", 10, epoch=1), since=8, factor=3.0)
    found = gather(path).before_after
    assert found.changes[0].percent == pytest.approx(-27, abs=4)
    assert found.part.first == 10
    with Store.open(path, read_only=True) as store:
        n_before = len([step for step in store.steps("job-1") if 10 <= step.step < 20])
    assert n_before == 10


def test_a_pace_that_changed_soon_after_the_first_plan_leaves_nothing_to_compare(tmp_path: Path):
    found = gather(slowed(tmp_path / "s.db", told("pace", 40, epoch=2), since=38)).before_after
    assert not found.changes
    assert re.search(r"\b10 .*\b32 .* step 30 ", found.explanation)
    assert "--no-agent --summary" in found.remedy


@pytest.mark.parametrize("kind", ["variant", "takeover"])
def test_other_news_is_not_of_the_pace(kind: str, tmp_path: Path):
    found = gather(slowed(tmp_path / "s.db", told(kind, 153), since=1000)).before_after
    assert found.part is None


@pytest.mark.parametrize(("factor", "is_alike"), [(1.0, True), (1.3, False)])
def test_starts_of_jobs_with_another_pace_are_no_yardstick(factor: float, is_alike: bool, tmp_path: Path):
    """Another batch size runs the very same collectives."""
    path = tmp_path / "s.db"
    make_store(path, "cold", n_untuned=5)
    make_store(path, "warm", n_untuned=5)
    slowed(path, told("variant", 0), since=0, factor=factor, job_id="warm")
    found = gather(path, "warm").before_after
    assert bool(found.changes) == is_alike


def test_too_few_own_steps_do_not_tell_whose_pace_is_the_same(tmp_path: Path):
    path = tmp_path / "s.db"
    make_store(path, "cold", n_untuned=20)
    make_store(path, "warm", n_untuned=3)
    found = gather(path, "warm").before_after
    assert not found.changes


def test_computation_that_changed_is_told_beside_exposed_communication(tmp_path: Path):
    """Too little to be noticed as another pace, where steps are mostly communication."""
    path = make_store(tmp_path / "s.db")
    with Store.open(path) as store:
        longer = [
            StepRecord(step.step, step.epoch, step.duration_us, 0.1 * step.duration_us, None)
            for step in store.steps("job-1")
            if step.step >= 100
        ]
        store.record_steps("job-1", longer)
        store.flush()
    names = [change.name for change in gather(path).before_after.changes]
    assert names[:2] == ["step time", "exposed communication"]
    assert len(names) == 3


def test_a_timeline_of_one_trace_stays_within_one_pace(tmp_path: Path):
    path = slowed(tmp_path / "s.db", told("pace", 153), since=150)
    block = np.zeros(600, OBSERVATION_FIELDS)
    block["message_bytes"], block["n_ranks"], block["n_nodes"], block["collective"] = 1 << 20, 2, 2, 2
    block["sequence"], block["step"] = np.arange(600), np.arange(600) // 3
    block["start_ns"], block["duration_us"] = 1 + np.arange(600) * 400_000, 300.0
    block["phase"], block["flags"] = 1 + np.arange(600) % 3, 2
    log = TraceLog(tmp_path / "t", job_id="job-1", rank=0, n_ranks=2, fabric_id="", fabric={}, version="0")
    log.record(block)
    log.steps([StepRecord(step, int(step >= 20), 1200.0, 100.0) for step in range(200)])
    log.close()
    facts = gather(path, traces=[tmp_path / "t"])
    assert facts.traced[0].steps["step"].max() == 142
    assert facts.traced[0].rows["step"].max() == 142


def test_the_reason_of_a_setting_is_its_promotion_not_news_of_the_job(tmp_path: Path):
    path = slowed(tmp_path / "s.db", told("pace", 153), since=150)
    facts = gather(path)
    assert all(one.kind in ("promote", "keep") for one in facts.settled().values())
    reasons = {one.key: one.decision.reason for one in facts.explained() if one.decision is not None}
    assert KEY in reasons
    assert not any("pace" in reason for reason in reasons.values())


def test_steps_after_a_plan_was_lifted_are_no_start(tmp_path: Path):
    """A plan expires where its daemon has died; what runs then is not what the job began with."""
    path = make_store(tmp_path / "s.db")
    before = gather(path).before_after.changes[0]
    with Store.open(path) as store:
        lifted = [one for one in store.steps("job-1") if 60 <= one.step < 90]
        store.record_steps(
            "job-1", [msgspec.structs.replace(one, epoch=0, duration_us=9 * one.duration_us) for one in lifted]
        )
        store.flush()
    after = gather(path).before_after.changes[0]
    assert after.before_us == before.before_us
