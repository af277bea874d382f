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


def test_trackers_get_names_and_steps(session, monkeypatch):
    got = []
    client = SimpleNamespace(log_metric=lambda run, name, value, step: got.append(("mlflow", run, name, step)))
    tracking = ModuleType("mlflow.tracking")
    tracking.MlflowClient = lambda: client
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", tracking)
    writer = SimpleNamespace(add_scalar=lambda name, value, step: got.append(("tensorboard", name, step)))
    run = SimpleNamespace(log=lambda scalars: got.append(("wandb", *sorted(scalars), scalars["zerotune/step"])))
    session.step(4)
    for reporting in (
        zerotune.callbacks.tensorboard(writer),
        zerotune.callbacks.wandb(run),
        zerotune.callbacks.mlflow("run"),
    ):
        reporting.close()
    assert {("tensorboard", name, 4) for name in NAMES} <= set(got)
    assert {("mlflow", "run", name, 4) for name in NAMES} <= set(got)
    assert [set(NAMES) <= set(one) and one[-1] == 4 for one in got if one[0] == "wandb"] == [True]


def test_hf_logs_have_the_figures_before_others_read_them(session, monkeypatch):
    transformers = ModuleType("transformers")
    transformers.TrainerCallback = type("TrainerCallback", (), {})
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=["tensorboard's"]))
    callback = zerotune.callbacks.hf_trainer(trainer)
    assert trainer.callback_handler.callbacks == [callback, "tensorboard's"]
    session.step(2)
    for is_first, names in ((True, NAMES), (False, set())):
        logs = {"loss": 1.0}
        callback.on_log(None, SimpleNamespace(is_world_process_zero=is_first), None, logs=logs)
        assert names <= set(logs)
        assert len(logs) > 1 or not is_first


@pytest.fixture
def lightning(monkeypatch):
    package, pytorch = ModuleType("lightning"), ModuleType("lightning.pytorch")
    pytorch.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", pytorch)
    return zerotune.callbacks.lightning()


def test_lightning_loggers_get_the_figures_as_often_as_losses(session, lightning):
    got = []
    logger = SimpleNamespace(log_metrics=lambda scalars, step: got.append((step, set(scalars))))
    trainer = SimpleNamespace(is_global_zero=True, global_step=0, log_every_n_steps=2, loggers=[logger])
    for batch in range(12):  # gradients of two are accumulated
        trainer.global_step = batch // 2
        session.step()
        lightning.on_train_batch_end(trainer, None, None, None, batch)
    assert [step for step, _ in got] == [2, 4]
    assert all(names >= NAMES for _, names in got)
    trainer.is_global_zero, trainer.global_step = False, 6
    lightning.on_train_batch_end(trainer, None, None, None, 0)
    assert len(got) == 2


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
