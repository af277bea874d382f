"""This job's figures, for trainers, experiment trackers and OpenTelemetry; see docs/frameworks.md#experiment-trackers.

Nothing here blocks training or raises into it, and without the agent nothing is logged.
"""

from zerotune.agent.callbacks.figures import Figures, figures
from zerotune.agent.callbacks.opentelemetry import opentelemetry
from zerotune.agent.callbacks.reporting import Reporting, mlflow, tensorboard, wandb
from zerotune.agent.callbacks.trainers import hf_trainer, lightning

__all__ = [
    "Figures",
    "Reporting",
    "figures",
    "hf_trainer",
    "lightning",
    "mlflow",
    "opentelemetry",
    "tensorboard",
    "wandb",
]
