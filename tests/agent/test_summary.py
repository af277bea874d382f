import json

import pytest

from zerotune.agent.steps.summary import SummaryWriter
from zerotune.store.records import StepRecord


@pytest.mark.parametrize("environment", [None, "0"])
def test_the_rank_of_the_process_group_decides_who_writes(tmp_path, monkeypatch, environment):
    """The environment says no rank in processes of mp.spawn, and the same one in all of them where it is set."""
    if environment is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", environment)
    path = tmp_path / "summary.json"
    for rank in (1, 0):
        assert not path.exists()
        summary = SummaryWriter(path)
        summary.describe(None, n_ranks=2, rank=rank)
        summary.add(StepRecord(1, 0, 100.0 + rank))
        summary.write("job-7")
    assert json.loads(path.read_text())["job_id"] == "job-7"
    assert [step["duration_us"] for step in json.loads(path.read_text())["steps"]] == [100.0]


def test_a_process_that_joined_no_job_writes_none(tmp_path):
    summary = SummaryWriter(tmp_path / "summary.json")
    summary.add(StepRecord(1, 0, 100.0))
    summary.write()
    assert not list(tmp_path.iterdir())
