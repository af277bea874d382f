"""The real libraries, offline; each test needs its own (`pip install -e .[trackers]`)."""

import json

import pytest

import zerotune.callbacks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEP = "zerotune/step_seconds"


def scalars_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    reader = EventAccumulator(str(events))
    reader.Reload()
    return {name: [one.value for one in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def test_tensorboard(session, tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    session.step(3)
    with SummaryWriter(str(tmp_path)) as writer:
        zerotune.callbacks.tensorboard(writer).close()
    assert scalars_of(tmp_path)[STEP] == [pytest.approx(1e-3)]


def test_wandb(session, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    session.step(3)
    run = wandb.init(mode="offline", dir=str(tmp_path), project="zerotune", settings=wandb.Settings(silent=True))
    zerotune.callbacks.wandb(run).close()
    assert run.summary[STEP] == 1e-3
    run.finish()
    assert list(tmp_path.rglob("*.wandb"))


def test_mlflow(session, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    session.step(3)
    with mlflow.start_run() as run:
        zerotune.callbacks.mlflow(run.info.run_id).close(timeout_s=60.0)
    assert mlflow.get_run(run.info.run_id).data.metrics[STEP] == 1e-3


def test_opentelemetry(session):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    zerotune.callbacks.opentelemetry(MeterProvider([reader]))
    session.step(3)
    found = json.loads(reader.get_metrics_data().to_json())
    metrics = {one["name"]: one for one in found["resource_metrics"][0]["scope_metrics"][0]["metrics"]}
    duration = metrics["zerotune.step.duration"]
    assert (duration["unit"], duration["data"]["data_points"][0]["value"]) == ("s", 1e-3)
    assert {"zerotune.epoch", "zerotune.tuned", "zerotune.healthy"} <= set(metrics)


def test_hf_trainer_with_its_own_tensorboard(session, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tensorboard")
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x):
            session.step()
            return {"loss": self.layer(x).square().mean()}

    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=4, logging_steps=2, report_to="tensorboard", use_cpu=True, save_strategy="no"
    )
    trainer = transformers.Trainer(Model(), arguments, train_dataset=[{"x": torch.ones(4)}] * 8)
    zerotune.callbacks.hf_trainer(trainer)
    trainer.train()
    (written,) = [found for found in [_all_scalars(tmp_path)] if found]
    assert any(name.endswith(STEP) and len(values) >= 2 for name, values in written.items()), written


def _all_scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for path in folder.rglob("events.out.tfevents.*"):
        reader = EventAccumulator(str(path))
        reader.Reload()
        found |= {name: [one.value for one in reader.Scalars(name)] for name in reader.Tags()["scalars"]}
    return found


def test_lightning_with_its_own_tensorboard(session, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    pytest.importorskip("tensorboard")
    import torch

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, _):
            session.step()
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    from lightning.pytorch.loggers import TensorBoardLogger

    trainer = lightning.Trainer(
        max_steps=4, log_every_n_steps=2, accelerator="cpu", devices=1, enable_progress_bar=False,
        enable_checkpointing=False, logger=TensorBoardLogger(str(tmp_path)),
        callbacks=[zerotune.callbacks.lightning()],
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
    assert len(_all_scalars(tmp_path)[STEP]) == 2
