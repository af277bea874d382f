"""The demo where something goes wrong."""

import shutil
import subprocess
import sys
from pathlib import Path

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
def test_a_demo_whose_daemons_folder_another_program_removes_ends_and_says_so(tmp_path, monkeypatch):
    def start(endpoint, *_, **__):
        shutil.rmtree(Path(endpoint.removeprefix("ipc://")).parent)
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])

    monkeypatch.setattr(demonstration, "start_in_background", start)
    with pytest.raises(UserError, match="another program has removed"):
        demonstration.demo(tmp_path, Console(quiet=True), n_steps=10)


@pytest.mark.slow
def test_a_daemon_that_no_rank_reaches_is_told_and_an_earlier_job_not_taken_for_this_one(tmp_path, monkeypatch):
    with Store.open(tmp_path / "store.db") as store:
        store.record_job("earlier", "earlier", {}, 2)
    (tmp_path / "report.html").write_text("of the run before")
    listen = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); time.sleep(100)"

    def start(endpoint, *_, **__):
        return subprocess.Popen([sys.executable, "-c", listen, endpoint.removeprefix("ipc://")])

    monkeypatch.setattr(demonstration, "start_in_background", start)
    with pytest.raises(UserError, match="did not reach"):
        demonstration.demo(tmp_path, Console(quiet=True), n_steps=10)
    assert (tmp_path / "on.summary.json").exists()
    assert not (tmp_path / "report.html").exists()
