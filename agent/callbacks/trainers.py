"""Callbacks that put the figures among what a trainer logs, so that they go wherever its losses go."""

from __future__ import annotations

import importlib
from typing import Any

from zerotune.agent.callbacks.figures import Watch


def hf_trainer(trainer: Any) -> Any:
    """Put the figures into the logs of a `transformers.Trainer`.

    The callback comes before all others: those that report to TensorBoard, Weights & Biases or MLflow get the figures
    with the losses.

    Returns:
        The callback, which `trainer.remove_callback` takes out again.
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
    """A callback for Lightning's `Trainer(callbacks=[...])`: its loggers get the figures as often as the losses."""
    base: Any
    try:
        base = importlib.import_module("lightning.pytorch").Callback
    except ModuleNotFoundError:
        base = importlib.import_module("pytorch_lightning").Callback
    watch = Watch()

    class ZerotuneCallback(base):  # type: ignore[misc]  # a base known at run time only
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.is_global_zero and trainer.global_step % max(1, trainer.log_every_n_steps) == 0:
                scalars = watch.figures().scalars()
                for logger in trainer.loggers if scalars else ():
                    logger.log_metrics(scalars, step=trainer.global_step)

    return ZerotuneCallback()
