"""Callbacks that add the figures to a trainer's logs, beside its losses."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from .figures import Watch

logger = logging.getLogger("zerotune.callbacks")


def hf_trainer(trainer: Any) -> Any:
    """Put the figures into the logs of a `transformers.Trainer`.

    The callback comes before all others, so that those for TensorBoard, Weights & Biases or MLflow report the figures
    with the losses. It is returned for `trainer.remove_callback`.
    """
    base: Any = importlib.import_module("transformers").TrainerCallback
    watch = Watch()

    class ZerotuneCallback(base):  # type: ignore[misc]  # a base known at run time only
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs is not None and state.is_world_process_zero:
                logs.update(watch.figures().scalars())

    callback = ZerotuneCallback()
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


def lightning() -> Any:
    """A callback for Lightning's `Trainer(callbacks=[...])`: its loggers get the figures as often as the losses.

    An exception of a logger is logged once here; training goes on.
    """
    base: Any
    try:
        base = importlib.import_module("lightning.pytorch").Callback
    except ModuleNotFoundError:
        base = importlib.import_module("pytorch_lightning").Callback
    watch = Watch()

    class ZerotuneCallback(base):  # type: ignore[misc]  # a base known at run time only
        last_step = 0
        has_failed = False

        # With gradient accumulation several batches have the same step.
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            step = trainer.global_step
            if not trainer.is_global_zero or 0 <= step - self.last_step < max(1, trainer.log_every_n_steps):
                return
            self.last_step = step
            try:
                scalars = watch.figures().scalars()
                for tracker in trainer.loggers if scalars else ():
                    tracker.log_metrics(scalars, step=step)
            except Exception as error:
                if not self.has_failed:
                    self.has_failed = True
                    logger.warning("zerotune: figures cannot be logged, training goes on: %r", error)

    return ZerotuneCallback()
