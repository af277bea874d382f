"""The learner's thread and its training process."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from zerotune.store.records import ModelRecord
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.tuner.modeling import learner as learner_module
from zerotune.tuner.modeling.learner import MAX_WAITING, Learner
from zerotune.tuner.modeling.requests import Request, RequestKind

MODEL = ModelRecord("correction", "f", b"blob", {"features": "1"}, "hash", 0.1, 1.0)


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "store.db") as store:
        yield store


@pytest.fixture
def made(store):
    """A learner that puts what is ready into a queue."""
    ready: queue.Queue[tuple[str, object]] = queue.Queue()

    def load(store, fabric_id):
        if fabric_id == "broken":
            raise ValueError("scripted")
        return [model.name for model in store.models()]

    learner = Learner(store, load, "empty", lambda *news: ready.put(news))
    yield learner, ready
    learner.close()


def test_knowledge_is_loaded_beside_the_loop(made):
    learner, ready = made
    learner.ask(Request(RequestKind.load, "f"))
    assert ready.get(timeout=10) == ("f", [])


def test_endless_requests_fill_no_memory(store):
    may_load = threading.Event()
    learner = Learner(store, lambda *_: may_load.wait(60), None, lambda *_: None)
    for number in range(MAX_WAITING + 10):
        learner.ask(Request(RequestKind.load, f"f{number}"))
    may_load.set()
    learner.close()
    assert 9 <= learner.n_failed <= 10


def test_when_loading_fails_the_job_starts_from_nothing(made, caplog):
    learner, ready = made
    learner.ask(Request(RequestKind.load, "broken"))
    assert ready.get(timeout=10) == ("broken", "empty")
    assert "broken" in caplog.text


def test_a_store_that_breaks_meanwhile_does_not_end_the_learner(made, monkeypatch, store):
    learner, ready = made

    def broken():
        raise sqlite3.DatabaseError("database disk image is malformed")

    with monkeypatch.context() as patch:
        patch.setattr(store, "models", broken)
        learner.ask(Request(RequestKind.load, "f"))
        assert ready.get(timeout=10) == ("f", "empty")
    assert learner.n_failed == 1
    learner.ask(Request(RequestKind.load, "f"))
    assert ready.get(timeout=10) == ("f", [])


def test_a_fit_that_is_told_to_end_is_no_failure(made, monkeypatch, caplog):
    """As a batch system ends all processes of a daemon at once."""
    learner, ready = made
    ending = f"import os; os.kill(os.getpid(), {int(signal.SIGTERM)})"
    popen = subprocess.Popen
    monkeypatch.setattr(
        learner_module.subprocess, "Popen", lambda _, **options: popen([sys.executable, "-c", ending], **options)
    )
    learner.ask(Request(RequestKind.train, "f"))
    assert ready.get(timeout=10) == ("f", [])
    assert learner.n_failed == 0
    assert not caplog.text


def test_signals_to_the_daemons_group_do_not_reach_a_fit(made, monkeypatch):
    groups: queue.Queue[int] = queue.Queue()
    popen = subprocess.Popen

    def started(_, **options):
        child = popen([sys.executable, "-c", "input()"], **options | {"stdin": subprocess.PIPE})
        groups.put(os.getpgid(child.pid))
        return child

    monkeypatch.setattr(learner_module.subprocess, "Popen", started)
    made[0].ask(Request(RequestKind.train, "f"))
    assert groups.get(timeout=10) != os.getpgid(0)


def test_a_damaged_model_is_fitted_anew(made, store):
    learner, _ = made
    block = np.zeros(1, MEASUREMENT)
    block["message_bytes"] = block["duration_us"] = 1
    store.record_measurements("f", "j", block)
    store.save_model(MODEL)
    store.flush()
    assert not learner.never_fitted("f")
    with contextlib.closing(sqlite3.connect(store.path)) as connection, connection:
        connection.execute("UPDATE models SET versions = 'x'")
    assert learner.never_fitted("f")


def test_a_failing_fit_leaves_the_old_knowledge(made, monkeypatch, caplog):
    learner, ready = made
    monkeypatch.setattr(sys, "executable", "/bin/false")
    learner.ask(Request(RequestKind.train, "f"))
    learner.ask(Request(RequestKind.load, "g"))
    assert ready.get(timeout=10) == ("g", [])
    assert "exited with 1" in caplog.text


def test_a_fit_that_takes_too_long_is_given_up_in_one_line(made, tmp_path, monkeypatch, caplog):
    learner, ready = made
    script = tmp_path / "sleeps.sh"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(learner_module, "TRAIN_TIMEOUT_S", 0.1)
    learner.ask(Request(RequestKind.train, "f"))
    learner.ask(Request(RequestKind.load, "g"))
    assert ready.get(timeout=10) == ("g", [])
    assert learner.n_failed == 1
    (record,) = caplog.records
    assert record.exc_info is None


def test_a_fit_that_was_cut_short_is_made_up_for(made, monkeypatch, store):
    learner, ready = made
    monkeypatch.setattr(Learner, "fit", lambda *_: MODEL)
    block = np.zeros(1, MEASUREMENT)
    block["n_ranks"] = block["message_bytes"] = block["duration_us"] = 1
    store.record_measurements("f", "job", block)
    store.flush()
    learner.ask(Request(RequestKind.load, "f"))
    assert ready.get(timeout=10) == ("f", []), "what is there, at once"
    assert ready.get(timeout=10) == ("f", ["correction"]), "then the model"
    learner.ask(Request(RequestKind.load, "f"))
    assert ready.get(timeout=10) == ("f", ["correction"])
    learner.ask(Request(RequestKind.load, "g"))
    assert ready.get(timeout=10)[0] == "g", "no second fit in between"


def test_closing_kills_a_fit_in_flight(store, tmp_path, monkeypatch):
    started = threading.Event()
    script = tmp_path / "sleeps.sh"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    popen = learner_module.subprocess.Popen
    children = []

    def watched(*arguments, **options):
        children.append(popen(*arguments, **options))
        started.set()
        return children[-1]

    monkeypatch.setattr(learner_module.subprocess, "Popen", watched)
    learner = Learner(store, lambda *_: None, None, lambda *_: None)
    learner.ask(Request(RequestKind.train, "f"))
    assert started.wait(10)
    learner.close()
    assert children[0].returncode == -9
    assert sys.executable == str(script)


def test_a_fit_does_not_outlive_a_daemon_that_is_killed(store):
    holder = (
        "import subprocess, sys, time\n"
        "command = [sys.executable, '-m', 'zerotune.tuner.modeling.training_process', sys.argv[1], 'f']\n"
        "child = subprocess.Popen(command)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", holder, str(store.path)], stdout=subprocess.PIPE, text=True) as daemon:
        fit = psutil.Process(int(daemon.stdout.readline()))
        usual = fit.nice()
        while fit.nice() == usual < 19:  # it is nice as soon as it is bound to the daemon
            time.sleep(0.001)
        fit.suspend()  # it cannot end by itself
        daemon.kill()
    _, alive = psutil.wait_procs([fit], timeout=10)
    for one in alive:
        one.kill()
    assert alive == []
