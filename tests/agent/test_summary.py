import json
from types import SimpleNamespace

import pytest

from zerotune.agent.session import Session
from zerotune.agent.settings import AgentSettings
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


@pytest.mark.parametrize(("rank", "n_calls", "n_lines"), [("0", 5, 1), ("1", 5, 0), (None, 5, 0), ("0", 0, 0)])
def test_a_run_of_which_no_step_ended_says_that_it_writes_none(tmp_path, monkeypatch, caplog, rank, n_calls, n_lines):
    """As where a script only evaluates; torchrun's own process and a rank's workers have nothing to say."""
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    path = tmp_path / "summary.json"
    plugin = SimpleNamespace(n_calls=lambda: n_calls, set_recording=lambda _: None)
    Session(AgentSettings("ipc://nowhere", "job", summary_path=path), plugin).close()
    line = f"zerotune: no summary is written to {path}: no training step was seen to end"
    assert [record.getMessage() for record in caplog.records] == [line] * n_lines
    assert not path.exists()
