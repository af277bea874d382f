"""Of one job only neighbours are compared: no change of training's own pace passes for a plan's doing."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_material import control_windows, make_store

from zerotune.store.records import (
    StepRecord,
)
from zerotune.store.sqlite.database import Store
from zerotune.store.step_times import LEAST_BLOCKS
from zerotune.tuner.offline.report import gather


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
