"""The pictures of a report, and reasons for missing pictures of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from ....store.records import Phase
from .. import plots
from ..winners import winner_table
from . import step_timeline
from .facts import Facts
from .rank_calls import rank_calls
from .rank_tracks import rank_tracks
from .regret import regret_by_step


@dataclass(frozen=True)
class Picture:
    """One picture of the page."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def svg(self) -> Markup:
        """The picture as an SVG element of the page."""
        return Markup(plots.inline_svg(self.figure, self.name, self.title))


def pictures(facts: Facts) -> tuple[list[Picture], dict[str, str]]:
    """Every picture that has data, in the page's order, and reasons for missing pictures of a trace."""
    found = [
        _step_picture(facts, "duration_us", "step time", "steps"),
        _step_picture(facts, "exposed_us", "exposed communication", "exposed"),
        _timeline_picture(facts),
        _ranks_picture(facts),
        _winners_picture(facts),
        _regret_picture(facts),
        _memory_picture(facts),
    ]
    missing = {name: one for name, one in zip(("timeline", "ranks"), found[2:4], strict=True) if isinstance(one, str)}
    return [one for one in found if isinstance(one, Picture)], missing


def _step_picture(facts: Facts, column: str, title: str, name: str) -> Picture | None:
    changes: Sequence[int] = ()
    if facts.before is not None and facts.after is not None:
        runs: list[tuple[str, Sequence[Any]]] = [(run.label, run.steps) for run in (facts.before, facts.after)]
    else:
        runs = [(facts.job.name or facts.job.job_id, facts.steps)]
        changes = facts.changes_at
    lines = []
    for label, steps in runs:
        values = np.array([np.nan if (v := getattr(one, column)) is None else v for one in steps], np.float64)
        if len(values) < 2 or not np.isfinite(values).all():
            return None
        lines.append((label, np.array([one.step for one in steps]), values))
    caption = (
        "Thin: every step; thick: running median. Right: the last quarter of the steps, sorted; dotted: its median."
    )
    if changes:
        caption += " Dashed: from about there on training's own pace, or the network, was different."
    return Picture(name, title, caption, plots.step_times(lines, title, changes))


def _timeline_picture(facts: Facts) -> Picture | str | None:
    """One step before and after, with its exposed communication; only its collectives if that is unknown."""
    if not facts.traced:
        return None
    steps = step_timeline.timelines(facts.traced)
    if isinstance(steps, str):
        return _bare_timeline_picture(facts, steps)
    lanes = step_timeline.lanes_of(steps)
    if any(step.computation for step in steps):
        lanes = [plots.COMPUTATION, *lanes]
    shown = [
        (
            step.label,
            step.step_us,
            [*((plots.COMPUTATION, start, end) for start, end in step.computation), *step.communication],
            step.exposed,
        )
        for step in steps
    ]
    error = max(step.error_percent for step in steps)
    exposed = " then ".join(f"{step.exposed_us / 1e3:.1f} of {step.step_us / 1e3:.1f} ms" for step in steps)
    caption = (
        f"Orange: communication that computation waited for, {exposed}. Where a rank waited is inferred from the order"
        f" and times of its collectives; the step time that this gives is within {max(error, 0.1):.1f} % of the logged."
    )
    others = [table.job_id for table in facts.traced if table.job_id != facts.job.job_id]
    if len(facts.traced) == 1 and others:
        caption += f" The trace is of another job, {others[0] or 'which it does not name'}."
    title = "One step before and after" if len(steps) > 1 else "One step"
    return Picture("timeline", title, caption, plots.step_timelines(shown, lanes))


def _bare_timeline_picture(facts: Facts, reason: str) -> Picture | str:
    """The collectives of the step of median length in each traced run's last quarter."""
    if not all(len(table.steps) for table in facts.traced):
        return "the trace has no steps (measurements, or a format without steps)"
    labels = ["before", "after"] if len(facts.traced) == 2 else [facts.job.name or facts.job.job_id]
    steps: list[tuple[str, float, list[plots.Lane], list[plots.Lane]]] = []
    for label, table in zip(labels, facts.traced, strict=False):
        rows, duration_us = table.rows, table.duration_us
        tail = table.steps[-max(1, len(table.steps) // 4) :]
        step = int(tail["step"][np.argsort(tail["duration_us"])[len(tail) // 2]])
        shown = (rows["step"] == step) & np.isfinite(duration_us) & (rows["start_ns"] > 0)
        if not shown.any():
            return "the trace does not say when the collectives of a step began"
        start_us = (rows["start_ns"][shown] - rows["start_ns"][shown].min()) / 1e3
        ends_us = start_us + duration_us[shown]
        names = [Phase(int(phase)).name for phase in rows["phase"][shown]]
        communication = list(zip(names, start_us.tolist(), ends_us.tolist(), strict=True))
        steps.append((f"{label}: step {step}", float(ends_us.max()), communication, []))
    lanes = sorted({name for _, _, communication, _ in steps for name, *_ in communication}, key=lambda one: Phase[one])
    caption = f"The collectives of one settled step. What computation waited for is not known ({reason})."
    return Picture("timeline", "One step", caption, plots.step_timelines(steps, lanes))


def _ranks_picture(facts: Facts) -> Picture | str | None:
    """Tracks of the ranks of the last trace."""
    if not facts.trace_paths:
        return None
    calls = rank_calls(facts.traced[-1], facts.trace_paths[-1])
    return calls if isinstance(calls, str) else Picture("ranks", "Tracks of the ranks", *rank_tracks(calls))


def _winners_picture(facts: Facts) -> Picture | None:
    settled = facts.in_force()
    if not settled:
        return None
    figure = plots.winners(*winner_table(settled, facts.against_own))
    caption = (
        "Percentages are against NCCL's own choice. They are measured;"
        " what is only predicted says so and is hatched. Size classes of one octave share a cell: the measured one"
        " that changed most is shown, the table below has all."
    )
    return Picture("winners", "Winners", caption, figure)


def _regret_picture(facts: Facts) -> Picture | None:
    regret = regret_by_step(facts.measurements)
    if regret is None:
        return None
    figure = plots.over_steps("regret over time", "% over the best measured", *regret)
    caption = "What a step's measured collectives took beyond the best setting's median; below zero: faster than that."
    return Picture("regret", "Regret", caption, figure)


def _memory_picture(facts: Facts) -> Picture | None:
    known = [(one.step, one.memory_pressure) for one in facts.steps if one.memory_pressure is not None]
    if len(known) < 2:
        return None
    steps, pressure = np.array(known, np.float64).T
    figure = plots.over_steps("memory pressure", "% used", steps, 100 * pressure, top=100)
    caption = "Device memory used; without a GPU the memory of the process or its container."
    return Picture("memory", "Memory pressure", caption, figure)
