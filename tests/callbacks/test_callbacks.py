"""Figures of a job, and that neither a tracker nor a daemon that misbehaves meets training."""

import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

import zerotune.callbacks
from zerotune.agent import activate
from zerotune.agent.callbacks import figures as module
from zerotune.store.records import Stage
from zerotune.store.wire import JobStatus, StatusReply

NAMES = {"zerotune/epoch", "zerotune/step_seconds", "zerotune/tuned_ratio", "zerotune/healthy"}


def until(what, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    return what()


def test_without_the_agent_there_is_nothing_to_log(monkeypatch):
    monkeypatch.setattr(activate, "installed", None)
    assert zerotune.callbacks.figures() == zerotune.callbacks.Figures()
    assert zerotune.callbacks.figures().scalars() == {}


def test_the_daemon_says_health_and_budget(session, monkeypatch):
    status = JobStatus("job", "f", Stage.zero3, 2, 2, 1, 9, 1, 0, 0, 1.0, 1.0, 0.4, health="rank 1 is silent")
    reply = StatusReply(1, "0", "ipc://x", "s.db", 1.0, 1, 0, (status,))
    monkeypatch.setattr(module, "fetch_status", lambda *_: reply)
    assert until(lambda: zerotune.callbacks.figures().budget_spent_share == 0.004)
    assert zerotune.callbacks.figures().health == "rank 1 is silent"
    assert zerotune.callbacks.figures().scalars()["zerotune/healthy"] == 0.0


@pytest.mark.parametrize("fault", ["hangs", "raises"])
def test_a_look_waits_for_no_daemon(session, monkeypatch, fault):
    ever = threading.Event()

    def fetch(*_):
        if fault == "raises":
            raise RuntimeError("no")
        ever.wait(30.0)

    monkeypatch.setattr(module, "fetch_status", fetch)
    session.step(3)
    began_s = time.monotonic()
    for _ in range(100):
        assert zerotune.callbacks.figures().step == 3
    assert time.monotonic() - began_s < 5.0
    ever.set()


def test_a_broken_agent_is_off(session):
    session.recent_steps = None
    assert zerotune.callbacks.figures() == zerotune.callbacks.Figures()


def test_a_tracker_that_raises_is_called_again(session):
    seen = []

    def sink(scalars, step):
        seen.append((step, dict(scalars)))
        raise OSError("disk full")

    reporting = zerotune.callbacks.Reporting(sink, every_s=0.01)
    for n_reports in (1, 2):
        session.step()
        assert until(lambda n_reports=n_reports: len(seen) >= n_reports)
    reporting.close()
    assert [step for step, _ in seen] == [1, 2]
    assert set(seen[-1][1]) >= NAMES


def test_a_tracker_that_hangs_is_left_behind(session):
    ever = threading.Event()
    reporting = zerotune.callbacks.Reporting(lambda *_: ever.wait(30.0), every_s=0.01)
    session.step()
    began_s = time.monotonic()
    reporting.close(timeout_s=0.1)
    assert time.monotonic() - began_s < 10.0
    ever.set()


@pytest.fixture
def lightning(monkeypatch):
    package, pytorch = ModuleType("lightning"), ModuleType("lightning.pytorch")
    pytorch.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", pytorch)
    return zerotune.callbacks.lightning()


def test_a_lightning_logger_that_raises_does_not_meet_training(session, lightning):
    n_calls = 0

    def log_metrics(scalars, step):
        nonlocal n_calls
        n_calls += 1
        raise OSError("disk full")

    broken = SimpleNamespace(log_metrics=log_metrics)
    trainer = SimpleNamespace(is_global_zero=True, log_every_n_steps=1, loggers=[broken])
    for trainer.global_step in (1, 2):
        session.step()
        lightning.on_train_batch_end(trainer, None, None, None, 0)
    assert n_calls == 2
