"""Of one job only neighbours are compared: no change of training's own pace passes for a plan's doing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from report_material import control_windows, make_store, report_of

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
from zerotune.store.step_times import LEAST_BLOCKS
from zerotune.tuner.offline.report import gather

KEY = DecisionKey(CommunicatorClass(2, 2), Collective.all_gather, Phase.forward_gather, size_class(16 << 10))
PACE = "training's own pace changed: steps take 2.00 times as long with the same settings"


def slowed(path: Path, *, since: int, factor: float) -> Path:
    """The made-up job, whose steps take `factor` times as long from `since` on."""
    make_store(path)
    with Store.open(path) as store:
        steps = [
            StepRecord(one.step, one.epoch, factor * one.duration_us, factor * 0.3 * one.duration_us)
            for one in store.steps("job-1")
            if one.step >= since
        ]
        store.record_steps("job-1", steps)
        store.flush()
    return path


def own(saved: float):
    """What a step takes under NCCL's own choice that takes this share less under a plan."""
    return lambda step: step.duration_us / (1.0 - saved)


@pytest.mark.parametrize("saved", [0.1, 0.0, -0.1])
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_gain_is_that_of_neighbours_whatever_the_pace(saved: float, factor: float, tmp_path: Path):
    path = control_windows(slowed(tmp_path / "s.db", since=110, factor=factor), "job-1", own(saved))
    step_time, exposed = gather(path).before_after.changes
    for change in (step_time, exposed):
        assert change.low_percent < -100 * saved < change.high_percent
        assert change.is_beyond_noise == (saved != 0.0)
        assert change.after_us == pytest.approx(change.before_us * (1 + change.percent / 100))
    assert (step_time.name, exposed.name) == ("step time", "exposed communication")


def test_without_enough_control_windows_nothing_is_claimed(tmp_path: Path):
    """Older versions left none."""
    path = slowed(tmp_path / "s.db", since=110, factor=3.0)
    found = gather(path).before_after
    assert not found.changes
    assert "never" in found.explanation
    assert "--no-agent --summary" in found.remedy
    few = gather(control_windows(path, "job-1", own(0.1), first=160)).before_after
    assert not few.changes
    assert f" {LEAST_BLOCKS - 1} " in few.explanation


def test_steps_whose_windows_have_lost_their_neighbours_are_left_out(tmp_path: Path):
    """The daemon was away: what it heard of last, and first of all again, is no neighbourhood."""
    path = make_store(tmp_path / "s.db")
    with Store.open(path) as store:
        late = [msgspec.structs.replace(one, step=one.step + 12 * one.step // 4) for one in store.steps("job-1")]
        store.record_job("sparse", "f", {}, 2)
        store.record_steps("sparse", late)
        store.flush()
    assert not gather(control_windows(path, "sparse", own(0.1)), "sparse").before_after.changes


def test_a_lifted_plan_is_no_neighbour(tmp_path: Path):
    """A plan expires if its daemon has died; what runs then is NCCL's own choice, too, but not beside a plan."""
    path = control_windows(make_store(tmp_path / "s.db"), "job-1", own(0.1))
    before = gather(path).before_after.changes[0]
    with Store.open(path) as store:
        lifted = [one for one in store.steps("job-1") if 60 <= one.step < 72]
        store.record_steps("job-1", [StepRecord(one.step, 0, 9 * one.duration_us) for one in lifted])
        store.flush()
    after = gather(path).before_after.changes[0]
    assert after.percent == pytest.approx(before.percent, abs=1.5)


def test_windows_are_no_news_and_a_change_of_pace_is(tmp_path: Path):
    path = control_windows(slowed(tmp_path / "s.db", since=150, factor=2.0), "job-1", own(0.1))
    with Store.open(path) as store:
        fabric_id = next(job.fabric_id for job in store.jobs())
        store.record_decisions([Decision("job-1", fabric_id, KEY, BASELINE, 7, "pace", PACE, step=153)])
        store.flush()
    facts = gather(path)
    page = report_of(path, tmp_path)
    assert "step 153, epoch 7: " in page
    assert "a window" not in page
    assert facts.changes_at == [153]
    assert all(one.kind in ("promote", "keep") for one in facts.settled().values())
    reasons = {one.key: one.decision.reason for one in facts.explained() if one.decision is not None}
    assert KEY in reasons
    assert not any("pace" in reason for reason in reasons.values())
