"""The report never takes training's own pace, nor the network's, for a plan's doing."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from report_material import make_store

from zerotune.store.records import (
    BASELINE,
    Collective,
    CommunicatorClass,
    Decision,
    DecisionKey,
    Phase,
    size_class,
)
from zerotune.store.sqlite.database import Store
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
