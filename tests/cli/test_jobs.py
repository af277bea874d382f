"""`zerotune jobs` and `launch --name`: what jobs are called, how each ended, what it gained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.lib.command_line import zerotune
from zerotune.agent.launch import LaunchRequest, environment
from zerotune.agent.settings import AgentSettings
from zerotune.store.errors import UserError
from zerotune.store.lockfile import LockFile
from zerotune.store.records import BASELINE, Collective, CommunicatorClass, Decision, DecisionKey, Phase, StepRecord
from zerotune.store.records.job_names import is_job_name
from zerotune.store.sqlite.database import Store
from zerotune.tuner.client.holders import living_holder
from zerotune.tuner.offline.jobs.before_after import JobsRead
from zerotune.tuner.offline.jobs.finding import job_of
from zerotune.tuner.offline.jobs.listing import GainKind, JobEnd, end_of, gain_of, list_jobs

WINDOWS = range(1001, 1012)
"""Epochs of control windows."""


def steps(saved: float, n_untuned: int = 20) -> list[StepRecord]:
    """Steps of 100 us, with a little noise; then 140 under a plan that saves this share, with 11 control windows."""
    found = []
    for step in range(1, n_untuned + 141):
        window, place = divmod(step - n_untuned, 12)
        is_own = window > 0 and place < 2
        epoch = (1000 + window if is_own else 1) if step > n_untuned else 0
        us = 100.0 * (1.0 if is_own or not epoch else 1.0 - saved)
        found.append(StepRecord(step, epoch, us * (1 + 0.002 * (step * 3 % 5))))
    return found


def record(store: Store, job: str, recorded: list[StepRecord]) -> None:
    """Record a job's steps, and which epochs of theirs are control windows."""
    store.record_steps(job, recorded)
    key = DecisionKey(CommunicatorClass(2, 1), Collective.all_gather, Phase.other, 24)
    ran = {one.epoch for one in recorded}
    windows = [Decision(job, "fabric", key, BASELINE, one, "control", "") for one in WINDOWS if one in ran]
    store.record_decisions(windows)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    where = tmp_path / "s.db"
    with Store.open(where, clock=lambda: 1000.0) as store:
        for name, recorded in (
            ("faster", steps(0.2)),
            ("slower", steps(-0.1)),
            ("same", steps(0.0)),
            ("untuned", steps(0.0, n_untuned=50)[:50]),
            ("short", steps(0.2, n_untuned=2)[:30]),
        ):
            store.record_job(f"job-{name}", "fabric", {}, 2, name)
            record(store, f"job-{name}", recorded)
            store.update_job(f"job-{name}", ended_at_s=2000.0)
        store.record_job("sweep-1", "fabric", {}, 2)
        store.update_job("sweep-1", ended_at_s=2000.0)
    return where


def test_jobs_shows_each_gain(path: Path) -> None:
    gains = {line.name: line.gain for line in list_jobs(path, limit=9)}
    assert {name: gain.kind for name, gain in gains.items()} == {
        "short": GainKind.unknown,
        "untuned": GainKind.no_plan,
        "same": GainKind.within_noise,
        "slower": GainKind.measured,
        "faster": GainKind.measured,
    }
    assert list(gains) == ["short", "untuned", "same", "slower", "faster"], "the newest first"
    assert gains["faster"].saved_percent == pytest.approx(20, abs=0.5)
    assert gains["faster"].saved_us == pytest.approx(20, abs=0.5)
    assert gains["slower"].saved_percent == pytest.approx(-10, abs=0.5)
    assert gains["faster"].low_percent <= gains["faster"].saved_percent <= gains["faster"].high_percent
    assert gains["short"].saved_us is None
    assert gains["short"].why


def test_rounding_is_no_gain(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s.db") as store:
        store.record_job("job", "fabric", {}, 2)
        exact = [msgspec.structs.replace(one, duration_us=100.0 + 1e-12 * (one.epoch == 1)) for one in steps(0.0)]
        record(store, "job", exact)
    with Store.open(tmp_path / "s.db", read_only=True) as store:
        gain = gain_of(JobsRead(store), job_of(store, "job"))
    assert gain.kind is GainKind.within_noise




def test_jobs_shows_how_each_job_ended(path: Path) -> None:
    with Store.open(path) as store:
        store.record_job("silent", "fabric", {}, 2)
        store.update_job("silent", ended_at_s=3000.0, is_lost=True)
        store.record_job("raises", "fabric", {}, 2)
        store.update_job("raises", ended_at_s=3000.0, is_lost=True, failure="rank 1: RuntimeError")
        store.record_job("trains", "fabric", {}, 2)
        store.flush()
        assert {one.job_id: one.end for one in list_jobs(path, limit=1)} == {"trains": JobEnd.running}
        ends = {one.job_id: one.end for one in list_jobs(path, limit=99, all_kinds=True)}
        assert (ends["silent"], ends["job-faster"], ends["sweep-1"]) == (JobEnd.lost, JobEnd.ended, JobEnd.ended)
        assert ends["raises"] is JobEnd.failed
    # Its daemon is gone: nobody would see its end.
    (trains,) = (one for one in list_jobs(path, limit=99, all_kinds=True) if one.job_id == "trains")
    assert trains.end is JobEnd.unwatched
    with Store.open(path) as store:  # the next daemon does not take it for one of its own ...
        store.flush()
        assert end_of(job_of(store, "trains"), is_written=True) is JobEnd.unseen
        store.record_job("trains", "fabric", {}, 2, "again")  # ... until it greets
        store.flush()
        again = job_of(store, "again")
        assert (again.job_id, end_of(again, is_written=True)) == ("trains", JobEnd.running)
        store.record_job("trains", "fabric", {}, 2)
        store.flush()
        assert job_of(store, "trains").name == "again", "what is known stays"


def test_a_job_is_found_by_its_name_if_only_one_has_it(path: Path) -> None:
    with Store.open(path) as store:
        store.record_job("second", "fabric", {}, 2, "same")
        store.record_job("same-id", "fabric", {}, 2, "job-faster")
        store.flush()
        assert job_of(store, "faster").job_id == "job-faster"
        assert job_of(store, "job-faster").name == "faster", "an id comes before a name"
        with pytest.raises(UserError, match=r"2 jobs .*second, job-same"):
            job_of(store, "same")
        with pytest.raises(UserError, match="'nobody'"):
            job_of(store, "nobody")


@pytest.mark.parametrize(
    "command",
    [["explain"], ["report", "{out}.html"], ["report", "--plot", "list"], ["store", "export", "{out}.json"]],
)
def test_every_command_with_a_job_takes_the_name(command, path, tmp_path, monkeypatch, capsys) -> None:
    words = [word.format(out=tmp_path / "out") for word in command]
    for job, is_known in (("untuned", True), ("nobody", False)):
        code, _, error = zerotune(*words, "--store", str(path), "--job", job)
        assert ("nobody" in error) == (not is_known), error
        assert code in (0, 2), error


def test_a_lock_of_a_dead_writer_says_nothing(path: Path) -> None:
    lock = path.with_name(path.name + ".lock")
    held = LockFile(lock)
    text = lock.read_text()
    held.release()
    lock.write_text(text.replace('"pid": ', '"pid": 99999'))
    assert all(one.end is not JobEnd.running for one in list_jobs(path, limit=9))


def test_a_killed_writer_that_nobody_has_waited_for_is_dead(path: Path) -> None:
    lock = path.with_name(path.name + ".lock")
    held = LockFile(lock)
    text = lock.read_text()
    held.release()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        lock.write_text(text.replace(str(os.getpid()), str(process.pid)))
        assert living_holder(lock) is not None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie from here on
        assert living_holder(lock) is None


@pytest.mark.parametrize("name", ["a", "gpt-7b/run 3", "模型", "α_1:x", "x" * 64])
def test_names(name: str) -> None:
    assert is_job_name(name)
    env = environment(LaunchRequest(["true"], agent_on=False, name=name, environment={}))
    assert AgentSettings.from_environment(env).job_name == name


@pytest.mark.parametrize("name", ["", " a", "a\n", "a\tb", "\x1b[1m", "a\u202eb", "a\u00a0b", "x" * 65, "\ud800"])
def test_names_that_are_refused(name: str) -> None:
    assert not is_job_name(name)
    assert AgentSettings.from_environment({"ZEROTUNE_JOB_NAME": name}).job_name == ""
