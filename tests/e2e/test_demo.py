"""The demo where something goes wrong."""

import subprocess
import sys

import pytest
from rich.console import Console

from zerotune.store.errors import UserError
from zerotune.store.sqlite.database import Store
from zerotune.tuner.demo import demo as demonstration


def test_why_a_step_gains_other_than_its_communication_is_said_where_it_does():
    assert "73 us less" in demonstration.why_other(78.0, 5.0)
    assert "2 us more" in demonstration.why_other(3.0, 5.0)
    assert not demonstration.why_other(5.2, 5.0)


@pytest.mark.slow
def test_a_daemon_that_no_rank_reaches_is_told_and_an_earlier_job_not_taken_for_this_one(tmp_path, monkeypatch):
    with Store.open(tmp_path / "store.db") as store:
        store.record_job("earlier", "earlier", {}, 2)
    (tmp_path / "report.html").write_text("of the run before")
    deaf = [sys.executable, "-c", "import time; time.sleep(100)"]
    monkeypatch.setattr(demonstration, "start_in_background", lambda *_, **__: subprocess.Popen(deaf))
    with pytest.raises(UserError):
        demonstration.demo(tmp_path, Console(quiet=True), n_steps=10)
    assert (tmp_path / "on.summary.json").exists()
    assert not (tmp_path / "report.html").exists()
