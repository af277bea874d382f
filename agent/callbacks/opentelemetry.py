"""The figures as OpenTelemetry gauges; they are read on the exporter's thread."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, Final

from .figures import Watch

GAUGES: Final = {
    "zerotune/epoch": ("zerotune.epoch", "1", "Epoch of the plan in force; 0: NCCL's own choice."),
    "zerotune/step_seconds": ("zerotune.step.duration", "s", "Median of the latest steps."),
    "zerotune/tuned_ratio": ("zerotune.tuned", "1", "Share of collectives that a plan's setting applied to."),
    "zerotune/saved_ratio": ("zerotune.saved", "1", "Share of step time saved against NCCL's own choice."),
    "zerotune/budget_spent_ratio": ("zerotune.budget.spent", "1", "Share of step time that exploring has cost."),
    "zerotune/healthy": ("zerotune.healthy", "1", "1 where nothing is wrong with tuning."),
}
"""(instrument, its unit in UCUM, description) by the figure's name."""


def opentelemetry(meter_provider: Any = None) -> None:
    """Make observable gauges of the figures, by default with the global meter provider.

    Raises:
        ModuleNotFoundError: `opentelemetry-api` is missing, which `zerotune[opentelemetry]` brings.
    """
    metrics = importlib.import_module("opentelemetry.metrics")
    meter = metrics.get_meter("zerotune", meter_provider=meter_provider)
    for figure, (name, unit, description) in GAUGES.items():
        watch = Watch()

        def observe(_: Any, figure: str = figure, watch: Watch = watch) -> Iterable[Any]:
            value = watch.figures().scalars().get(figure)
            return [] if value is None else [metrics.Observation(value)]

        meter.create_observable_gauge(name, callbacks=[observe], unit=unit, description=description)
