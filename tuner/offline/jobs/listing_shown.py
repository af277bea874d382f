"""Prints `zerotune jobs`, and the last job's line of `zerotune status`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ....store.records.job_names import titled
from .listing import Gain, GainKind, JobEnd, JobLine

STYLES = {
    JobEnd.silent: "yellow",
    JobEnd.running: "green",
    JobEnd.ended: "none",
    JobEnd.failed: "red",
    JobEnd.lost: "yellow",
    JobEnd.unseen: "yellow",
    JobEnd.unwatched: "yellow",
}


def render(lines: Sequence[JobLine], console: Console) -> None:
    """Print jobs as a table, and below it why the newest unknown gain is unknown."""
    if not lines:
        console.print("No job has trained with this store yet: zerotune launch -- COMMAND", markup=False)
        return
    whole = [Column(name, no_wrap=True) for name in ("job", "started", "steps")]
    table = Table("name", *whole, "workload", "end", "saved per step", box=None)
    for one in lines:
        table.add_row(
            escape(one.name) or "-",
            escape(one.job_id),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(one.started_at_s)) if one.started_at_s else "-",
            f"{one.n_steps:,}",
            one.stage,
            f"[{STYLES[one.end]}]{one.end.value}[/]",
            _gain(one.gain) + (" (emulated)" if one.emulated and one.gain.saved_us is not None else "")
            if one.n_steps
            else "-",
        )
    console.print(table)
    if any(one.end is JobEnd.unseen for one in lines):
        console.print("unseen: no daemon ran when it ended: nobody counted its last steps, nor knows how it ended")
    if any(one.end is JobEnd.unwatched for one in lines):
        console.print("unwatched: no daemon runs; such a job may train on, and greets the next `zerotune daemon`")
    if unknown := next((one for one in lines if one.n_steps and one.gain.kind is GainKind.unknown), None):
        why = f"{titled(unknown.job_id, unknown.name)}: {unknown_gain(unknown.gain)}"
        console.print(why, style="dim", markup=False, highlight=False, soft_wrap=True)


def last_job_in_words(line: JobLine) -> str:
    """An ended job's gain, in one or two lines."""
    gain, title = line.gain, titled(line.job_id, line.name)
    if gain.kind is GainKind.no_plan:
        return f"{title}: nothing was changed: {gain.why}"
    if gain.saved_us is None or gain.saved_percent is None:
        return f"{title}: {unknown_gain(gain)}"
    if gain.kind is GainKind.within_noise:
        return f"{title}: nothing gained or lost beyond noise against NCCL's own choice"
    on = f" on the emulated fabric {line.emulated}" if line.emulated else ""
    return (
        f"{title}: {'saved' if gain.saved_us > 0 else 'lost'} {_time_ms(gain)} per step{on} against NCCL's own choice,"
        f" {gain.saved_percent:.1f} % (95 %: {gain.low_percent:.1f} to {gain.high_percent:.1f} %)"
    )


def unknown_gain(gain: Gain) -> str:
    """Why a job's gain is unknown, and what it takes to know it."""
    return f"gain unknown: {gain.why}"


def _gain(gain: Gain) -> str:
    if gain.kind is GainKind.no_plan:
        return "nothing changed"
    if gain.saved_us is None or gain.saved_percent is None:
        return f"unknown: {gain.why.partition(':')[0]}"
    if gain.kind is GainKind.within_noise:
        return "nothing beyond noise"
    return f"{'' if gain.saved_us > 0 else '-'}{_time_ms(gain)}, {gain.saved_percent:.1f} %"


def _time_ms(gain: Gain) -> str:
    return f"{abs(gain.saved_us or 0.0) / 1000:,.3g} ms"
