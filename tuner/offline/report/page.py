"""Facts and pictures to one self-contained HTML page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from numpy.typing import NDArray

from zerotune.store.atomic_file import users_file
from zerotune.store.records import Outcome, Phase, size_class_range
from zerotune.tuner.client.status import workload
from zerotune.tuner.offline import plots
from zerotune.tuner.offline.explanations import Explanation
from zerotune.tuner.offline.explanations_shown import MEANINGS, noted, shown
from zerotune.tuner.offline.jobs.listing import as_gain
from zerotune.tuner.offline.jobs.listing_shown import unknown_gain
from zerotune.tuner.offline.report import step_timeline
from zerotune.tuner.offline.report.equal_rows import groups_of
from zerotune.tuner.offline.report.facts import Facts, trust, untrained
from zerotune.tuner.offline.report.interactive import plotly_script, specification
from zerotune.tuner.offline.report.rank_calls import rank_calls
from zerotune.tuner.offline.report.rank_tracks import RankTracks, rank_tracks
from zerotune.tuner.offline.size_ranges import rounded_range
from zerotune.tuner.offline.winners import winner_table

Array = NDArray[Any]


@dataclass(frozen=True)
class Picture:
    """One picture of the page."""

    name: str
    title: str
    caption: str
    figure: Figure
    svg: Markup


def write_page(facts: Facts, out: Path, *, is_interactive: bool = False) -> Path:
    """Write the page to `out` in one piece.

    Args:
        is_interactive: as in `page`.

    Returns:
        `out`.

    Raises:
        UserError: the job did not train, plotly is wanted and not there, or `out` cannot be written.
    """
    if not facts.is_of_training:
        raise untrained(facts)
    text = page(facts, is_interactive=is_interactive)
    with users_file(out) as partial:
        partial.write_text(text, encoding="utf-8")
    return out


def page(facts: Facts, *, is_interactive: bool = False) -> str:
    """The whole page as text.

    Args:
        is_interactive: with plotly's script, some 5 MB, for pictures that can be hovered over and zoomed.
    """
    template = resources.files("zerotune.tuner.offline.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["us"] = _us
    environment.filters["percent"] = lambda value: f"{value:+.1f} %".replace("-", "−")
    environment.filters["noted"] = noted
    missing = [("Timeline", missing_timeline(facts))]
    script = plotly_script() if is_interactive else ""
    tracks = _tracks(facts) if is_interactive else None
    if isinstance(tracks, str):
        missing.append(("Tracks of the ranks", tracks))
    return environment.from_string(template).render(
        facts=facts,
        incomparable=_incomparable(facts),
        pictures=pictures(facts),
        script=script,
        theme=list(plots.THEME.items()),
        specification=specification,
        tracks=tracks if isinstance(tracks, RankTracks) else None,
        decisions=_decision_rows(facts),
        undecided=_undecided(facts),
        workload=workload(facts.job.stage, facts.missing_evidence),
        collectives=facts.collectives_us(),
        meanings=MEANINGS,
        trust=[*trust(facts), *((what, f"None: {reason}.") for what, reason in missing if reason)],
        written=time.strftime("%Y-%m-%d %H:%M", time.localtime()),
        started=time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.job.started_at_s)),
    )


def _incomparable(facts: Facts) -> str:
    """Why no step times are set side by side; the same words as those of `zerotune jobs`."""
    if facts.before is None and facts.highest_epoch == 0:
        return facts.before_after.explanation
    return unknown_gain(as_gain(facts.before_after))


def pictures(facts: Facts) -> list[Picture]:
    """Every picture for which there is data, in the page's order."""
    found = [
        _step_picture(facts, "duration_us", "step time", "steps"),
        _step_picture(facts, "exposed_us", "exposed communication", "exposed"),
        _timeline_picture(facts),
        _winners_picture(facts),
        _regret_picture(facts),
        _memory_picture(facts),
    ]
    return [one for one in found if one is not None]


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
    return _picture(plots.step_times(lines, title, changes), name, title, caption)


def _timeline_picture(facts: Facts) -> Picture | None:
    """One step before and after, with its exposed communication; the collectives alone where that is not known."""
    if not facts.traced:
        return None
    steps = step_timeline.timelines(facts.traced)
    if isinstance(steps, str):
        return _bare_timeline_picture(facts, steps)
    figure = plots.step_timelines(
        [(step.label, step.step_us, step.computation, step.communication, step.exposed) for step in steps],
        step_timeline.lanes_of(steps),
    )
    error = max(step.error_percent for step in steps)
    exposed = " then ".join(f"{step.exposed_us / 1e3:.1f} of {step.step_us / 1e3:.1f} ms" for step in steps)
    caption = (
        f"Orange: communication that computation waited for, {exposed}. Where a rank waited is inferred from the order"
        f" and times of its collectives; the step time that this gives is within {max(error, 0.1):.1f} % of the logged."
    )
    others = [table.job_id for table in facts.traced if table.job_id != facts.job.job_id]
    if len(facts.traced) == 1 and others:
        caption += f" The trace is of another job, {others[0] or 'which it does not name'}."
    return _picture(figure, "timeline", "One step before and after" if len(steps) > 1 else "One step", caption)


def missing_timeline(facts: Facts) -> str:
    """Why the traces that were given show no timeline; empty where there is one, or no trace."""
    if not facts.traced or _timeline_picture(facts) is not None:
        return ""
    if not all(len(table.steps) for table in facts.traced):
        return "the trace has no steps (measurements, or a format without steps)"
    return "the trace does not say when the collectives of a step began"


def _tracks(facts: Facts) -> RankTracks | str | None:
    """Tracks of the ranks of the last trace; a reason where it has none, None where there is no trace."""
    if not facts.trace_paths:
        return None
    calls = rank_calls(facts.traced[-1], facts.trace_paths[-1])
    return calls if isinstance(calls, str) else rank_tracks(calls)


def _bare_timeline_picture(facts: Facts, reason: str) -> Picture | None:
    """The step of median length in each traced run's last quarter, collectives only."""
    labels = ["before", "after"] if len(facts.traced) == 2 else [facts.job.name or facts.job.job_id]
    steps: list[tuple[str, float, list[tuple[float, float]], list[plots.Lane], list[plots.Lane]]] = []
    for label, table in zip(labels, facts.traced, strict=False):
        rows, duration_us = table.rows, table.duration_us
        tail = table.steps[-max(1, len(table.steps) // 4) :]
        if not len(tail):
            return None
        step = int(tail["step"][np.argsort(tail["duration_us"])[len(tail) // 2]])
        shown = (rows["step"] == step) & np.isfinite(duration_us) & (rows["start_ns"] > 0)
        if not shown.any():
            return None
        start_us = (rows["start_ns"][shown] - rows["start_ns"][shown].min()) / 1e3
        ends_us = start_us + duration_us[shown]
        names = [Phase(int(phase)).name for phase in rows["phase"][shown]]
        communication = list(zip(names, start_us.tolist(), ends_us.tolist(), strict=True))
        steps.append((f"{label}: step {step}", float(ends_us.max()), [], communication, []))
    if not steps:
        return None
    lanes = sorted({name for *_, communication, _ in steps for name, *_ in communication}, key=lambda name: Phase[name])
    caption = f"The collectives of one settled step. What computation waited for is not known ({reason})."
    return _picture(plots.step_timelines(steps, lanes), "timeline", "One step", caption)


def _winners_picture(facts: Facts) -> Picture | None:
    settled = facts.in_force()
    if not settled:
        return None
    figure = plots.winners(*winner_table(settled, facts.against_own))
    caption = (
        "Percentages are the change of time against NCCL's own choice, below zero: faster. They are measured;"
        " what is only predicted says so and is hatched. Size classes of one octave share a cell: the measured one"
        " that changed most is shown, the table below has all."
    )
    return _picture(figure, "winners", "Winners", caption)


def _regret_picture(facts: Facts) -> Picture | None:
    regret = regret_by_step(facts.measurements)
    if regret is None:
        return None
    steps, percent = regret
    figure = plots.over_steps("regret over time", "% over the best measured", steps, percent)
    caption = "What a step's measured collectives took beyond the best setting's median; below zero: faster than that."
    return _picture(figure, "regret", "Regret", caption)


def regret_by_step(measurements: Array) -> tuple[Array, Array] | None:
    """Step numbers (n,) and regret in percent (n,), against the best median per shape with 3 or more samples."""
    ok = measurements[(measurements["outcome"] == Outcome.ok) & (measurements["duration_us"] > 0)]
    if not len(ok):
        return None
    place_columns = ["n_ranks", "n_nodes", "message_bytes", "collective", "phase"]
    setting_columns = ["algorithm", "protocol", "n_channels"]
    places, place = groups_of(ok, place_columns)
    _, setting = groups_of(ok, [*place_columns, *setting_columns])
    best = np.full(len(places), np.inf)
    order = np.argsort(setting, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(setting[order])) + 1):
        if len(rows) >= 3:
            at = place[rows[0]]
            best[at] = min(best[at], float(np.median(ok["duration_us"][rows])))
    judged = np.isfinite(best[place])
    if not judged.any():
        return None
    steps, index = np.unique(ok["step"][judged], return_inverse=True)
    took = np.bincount(index, weights=ok["duration_us"][judged])
    could = np.bincount(index, weights=best[place][judged])
    return (steps, 100 * (took / could - 1)) if len(steps) > 1 else None


def _memory_picture(facts: Facts) -> Picture | None:
    known = [(one.step, one.memory_pressure) for one in facts.steps if one.memory_pressure is not None]
    if len(known) < 2:
        return None
    steps, pressure = np.array(known, np.float64).T
    figure = plots.over_steps("memory pressure", "% used", steps, 100 * pressure, top=100)
    caption = "Device memory used; without a GPU the memory of the process or its container."
    return _picture(figure, "memory", "Memory pressure", caption)


def _picture(figure: Figure, name: str, title: str, caption: str) -> Picture:
    return Picture(name, title, caption, figure, Markup(plots.inline_svg(figure, name, title)))


def _decision_rows(facts: Facts) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    settled = facts.settled()
    for one in facts.explained():
        key = one.key
        rows.append(
            {
                "place": (key.collective.name, key.phase.name),
                "ranks": str(key.communicator),
                "bytes": rounded_range(one.min_bytes, one.max_bytes, "\nto ").splitlines(),
                "decision": one.decision,
                "against_own": facts.against_own(settled[key]),
                "expected": _expected(one),
                "explained": one,
                "alternatives": shown(one.alternatives),
            }
        )
    return rows


def _expected(explained: Explanation) -> tuple[float | None, float | None, float | None]:
    """What was expected of the setting that the last decision chose, and both ends of the 90 % interval (us)."""
    for one in explained.alternatives:
        if one["candidate"] == (explained.not_adopted or explained.setting) and one["predicted_us"] is not None:
            return one["predicted_us"], one["predicted_low_us"], one["predicted_high_us"]
    last = explained.decision
    return (None, None, None) if last is None else (last.predicted_us, last.predicted_low_us, last.predicted_high_us)


def _undecided(facts: Facts) -> list[str]:
    """What ran in this job without any decision."""
    settled = facts.settled()
    found = []
    for key in sorted(facts.here):
        if key not in settled:
            sizes = rounded_range(*size_class_range(key.size_class))
            found.append(f"{key.collective.name}, {key.phase.name}, {sizes}")
    return found


def _us(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value / 1e3:,.2f} ms" if value >= 1000 else f"{value:,.1f} µs"
