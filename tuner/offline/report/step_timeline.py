"""One step of a traced run, drawn from its program: computation, communication, and what of it was exposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from zerotune.store.records import Phase
from zerotune.tuner.offline.replay.table import CollectiveTable
from zerotune.tuner.offline.replay.timeline.program import OpKind, Program
from zerotune.tuner.offline.replay.timeline.schedule import StepModel, infer

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
    """How far the program's step time is from the logged ones."""

    @property
    def exposed_us(self) -> float:
        """Sum of what was waited for."""
        return sum(end - start for _, start, end in self.exposed)


def timelines(tables: Sequence[CollectiveTable]) -> list[StepTimeline] | str:
    """A step of each trace's last quarter: before and after if there are two; a reason if one is not known."""
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
    """The steady step of `model` with the durations that were logged."""
    program = model.program
    free_us = [0.0] * (1 + max((call.stream for call in program.calls), default=0))
    ends_us = [0.0] * len(program.calls)
    now_us = 0.0
    for _ in range(3):  # the first repetitions fill the pipeline
        computation: list[Span] = []
        communication: list[tuple[str, float, float]] = []
        exposed: list[tuple[str, float, float]] = []
        began_us = now_us
        for kind, at, compute_us in program.ops:
            if kind == OpKind.compute:
                computation.append((now_us, now_us + compute_us))
                now_us += compute_us
            elif kind == OpKind.issue:
                call = program.calls[at]
                start_us = max(now_us, free_us[call.stream] + call.launch_us)
                ends_us[at] = free_us[call.stream] = start_us + call.logged_us
                communication.append((_phase(program, at), start_us, ends_us[at]))
            elif ends_us[at] > now_us:
                exposed.append((_phase(program, at), now_us, ends_us[at]))
                now_us = ends_us[at]
    return StepTimeline(
        label=label,
        step_us=now_us - began_us,
        computation=[(start - began_us, end - began_us) for start, end in computation if end - start > MIN_SPAN_US],
        communication=[(phase, start - began_us, end - began_us) for phase, start, end in communication],
        exposed=[
            (phase, start - began_us, end - began_us) for phase, start, end in exposed if end - start > MIN_SPAN_US
        ],
        error_percent=model.error_percent,
    )


def _phase(program: Program, at: int) -> str:
    return program.calls[at].shape.phase.name


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
