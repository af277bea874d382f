"""One step of a traced run from its program: computation, communication, exposed communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ....store.records import Phase
from ...advice.prediction.timeline import OpKind, Timeline
from ...advice.prediction.timeline import Span as PlayedSpan
from ..replay.schedule import StepModel, infer
from ..replay.table import CollectiveTable

Span = tuple[float, float]
"""(start, end) in microseconds since the step began."""
SETTLED_SHARE: Final = 0.25
MIN_SPAN_US: Final = 0.5


@dataclass(frozen=True)
class StepTimeline:
    """A step, ready to be drawn."""

    label: str
    step_us: float
    computation: Sequence[Span]
    communication: Sequence[tuple[str, float, float]]
    """(phase, start, end), by start."""
    exposed: Sequence[tuple[str, float, float]]
    """(phase, start, end) of the parts of communication for which computation waited."""
    error_percent: float
    """Error of the program's step time against the logged ones."""

    @property
    def exposed_us(self) -> float:
        """Sum of exposed communication."""
        return sum(end - start for _, start, end in self.exposed)


def timelines(tables: Sequence[CollectiveTable]) -> list[StepTimeline] | str:
    """A step of each trace's last quarter (before and after if there are two), or the reason for having none."""
    labels = ["before", "after"]
    if len(tables) == 1:
        is_planned = (tables[0].steps["epoch"] > 0).any()
        labels = ["one settled step" if is_planned else "one settled step, under NCCL's own choice"]
    found = []
    for label, table in zip(labels, tables, strict=True):
        model = infer(_settled(table))
        if isinstance(model, str):
            return f"{label}: {model}" if len(tables) > 1 else model
        found.append(played(label, model))
    return found


def played(label: str, model: StepModel) -> StepTimeline:
    """The steady step of `model` with the logged durations."""
    program = replace(model.program, slowdown=None)
    timeline, began_us, step_us = Timeline(), 0.0, 0.0
    for _ in range(3):  # the first repetitions fill the pipeline
        spans: list[PlayedSpan] = []
        began_us += step_us
        step_us = timeline.step(program, spans=spans).end_us - began_us

    def of(kind: OpKind) -> list[tuple[int, float, float]]:
        found = [(op.at, begin_us - began_us, end_us - began_us) for op, begin_us, end_us in spans if op.kind is kind]
        return [one for one in found if kind is OpKind.issue or one[2] - one[1] > MIN_SPAN_US]

    def named(kind: OpKind) -> list[tuple[str, float, float]]:
        return [(program.calls[at].shape.phase.name, start, end) for at, start, end in of(kind)]

    return StepTimeline(
        label=label,
        step_us=step_us,
        computation=[(start, end) for _, start, end in of(OpKind.compute)],
        communication=named(OpKind.issue),
        exposed=named(OpKind.wait),
        error_percent=model.error_percent,
    )


def lanes_of(steps: Sequence[StepTimeline]) -> list[str]:
    """Phases that occur, in the order of a training step."""
    return sorted({phase for step in steps for phase, *_ in step.communication}, key=lambda name: Phase[name])


def _settled(table: CollectiveTable) -> CollectiveTable:
    """The last quarter of a trace's steps."""
    steps = table.steps[-max(8, int(len(table.steps) * SETTLED_SHARE)) :]
    kept = np.isin(table.rows["step"], steps["step"])
    return replace(
        table,
        rows=table.rows[kept],
        duration_us=table.duration_us[kept],
        is_default=table.is_default[kept],
        steps=steps,
    )
