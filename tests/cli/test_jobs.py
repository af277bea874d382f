"""`zerotune jobs` and `launch --name`: what jobs are called, how each ended, what it gained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib.command_line import zerotune
from zerotune.agent.launch import LaunchRequest, environment
from zerotune.agent.settings import AgentSettings
from zerotune.store.errors import UserError
from zerotune.store.job_names import is_job_name
from zerotune.store.lockfile import LockFile
from zerotune.store.records import StepRecord
from zerotune.store.sqlite.database import Store
from zerotune.tuner.client.holders import living_holder
from zerotune.tuner.offline.jobs.before_after import JobsRead
from zerotune.tuner.offline.jobs.finding import job_of
from zerotune.tuner.offline.jobs.listing import GainKind, JobEnd, end_of, gain_of, list_jobs


def steps(*groups: tuple[int, int, float]) -> list[StepRecord]:
    """Groups of (epoch, how many, duration): steps 1, 2, ... one after another, with a little noise."""
    found: list[StepRecord] = []
    for epoch, n_steps, duration_us in groups:
        found += [StepRecord(1 + len(found) + at, epoch, duration_us * (1 + 0.002 * (at % 5))) for at in range(n_steps)]
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    where = tmp_path / "s.db"
    with Store.open(where, clock=lambda: 1000.0) as store:
        for name, recorded in (
            ("faster", steps((0, 20, 100.0), (1, 200, 80.0))),
            ("slower", steps((0, 20, 100.0), (1, 200, 110.0))),
            ("same", steps((0, 20, 100.0), (1, 200, 100.0))),
            ("untuned", steps((0, 50, 100.0))),
            ("short", steps((0, 2, 100.0), (1, 3, 80.0))),
        ):
            store.record_job(f"job-{name}", "fabric", {}, 2, name)
            store.record_steps(f"job-{name}", recorded)
            store.update_job(f"job-{name}", ended_at_s=2000.0)
        store.record_job("sweep-1", "fabric", {}, 2)
        store.update_job("sweep-1", ended_at_s=2000.0)
    return where


def test_what_each_gained(path: Path) -> None:
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


def test_a_job_whose_plan_came_at_once_is_compared_with_one_of_its_pace(path: Path) -> None:
    import numpy as np

    from zerotune.store.sqlite.database import MEASUREMENT

    block = np.zeros(3, MEASUREMENT)
    block["n_ranks"], block["n_nodes"], block["message_bytes"], block["collective"] = 2, 1, 4096, 2
    block["algorithm"], block["protocol"], block["duration_us"] = 1, 2, 50.0
    with Store.open(path) as store:
        for job in ("job-faster", "job-warm"):
            store.record_measurements("fabric", job, block)
        store.record_job("job-warm", "fabric", {}, 2)
        store.record_steps("job-warm", steps((0, 6, 100.0), (1, 200, 80.0)))
        store.flush()
        warm = job_of(store, "job-warm")
        assert gain_of(JobsRead(store), warm).saved_percent == pytest.approx(20, abs=0.5)


def test_how_jobs_end(path: Path) -> None:
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


@pytest.mark.parametrize("command", [["explain"], ["report", "{out}"], ["plot", "list"], ["export", "{out}"]])
def test_every_command_with_a_job_takes_the_name(command, path, tmp_path, monkeypatch, capsys) -> None:
    words = [word.format(out=tmp_path / "out.json") for word in command]
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
def test_what_is_no_name(name: str) -> None:
    assert not is_job_name(name)
    assert AgentSettings.from_environment({"ZEROTUNE_JOB_NAME": name}).job_name == ""
