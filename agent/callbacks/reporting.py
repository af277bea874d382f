"""Reports figures to a tracker on a thread of its own, so that a slow or broken tracker cannot delay training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from .figures import Watch

logger = logging.getLogger("zerotune.callbacks")

EVERY_S: Final = 10.0
"""Default interval between reports; a tracker is a server, so it is not short."""
Sink = Callable[[Mapping[str, float], int], Any]
"""Takes figures by name, and the step."""


class Reporting:
    """Owns thread `zerotune-reporting`: calls a sink every `every_s` seconds, until it is closed or the process ends.

    The first exception of the sink is logged, later ones are ignored.
    """

    def __init__(self, sink: Sink, every_s: float = EVERY_S) -> None:
        self._sink, self._every_s = sink, every_s
        self._watch = Watch()
        self._closing = threading.Event()
        self._has_failed = False
        self._last_step = -1
        self._thread = threading.Thread(target=self._run, name="zerotune-reporting", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Report once more and stop; gives up on a sink that hangs for `timeout_s`."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            self._report()
        self._report()

    def _report(self) -> None:
        found = self._watch.figures()
        scalars = found.scalars()
        if not scalars or found.step <= self._last_step:
            return
        self._last_step = found.step
        try:
            self._sink(scalars, found.step)
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("zerotune: figures cannot be reported, training goes on: %r", error)


def tensorboard(writer: Any, every_s: float = EVERY_S) -> Reporting:
    """Report to a `SummaryWriter`, of torch or of tensorboardX."""

    def sink(scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return Reporting(sink, every_s)


def wandb(run: Any, every_s: float = EVERY_S) -> Reporting:
    """Report to a run of Weights & Biases (the result of `wandb.init()`).

    The run's own step is not set, since the script may count steps differently; `zerotune/step` is the training step.
    """

    def sink(scalars: Mapping[str, float], step: int) -> None:
        run.log({**scalars, "zerotune/step": step})

    return Reporting(sink, every_s)


def mlflow(run_id: str, every_s: float = EVERY_S) -> Reporting:
    """Report to a run of MLflow, by its id: MLflow's active run is known in the caller's thread only."""

    def sink(scalars: Mapping[str, float], step: int) -> None:
        from mlflow.tracking import MlflowClient

        client = MlflowClient()
        for name, value in scalars.items():
            client.log_metric(run_id, name, value, step=step)

    return Reporting(sink, every_s)
