"""A snapshot as lines for a terminal of any size; the printing code filters control characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Final

from rich.text import Text

from ...store.counted import size_text
from ...store.records import DecisionKind
from ..offline.jobs.listing import Gain, GainKind
from .snapshot import JobView, KeyLine, Snapshot

BLOCKS: Final = "▁▂▃▄▅▆▇█"
LEAST_DECISIONS: Final = 3
"""Decisions shown of a job if the height has no limit."""
MOST_KEYS: Final = 4
LEAST_SHOWN_PERCENT: Final = 0.05
"""Least share of a step that is shown; less would be shown as 0.0."""


def screen(snapshot: Snapshot, width: int, height: int | None = None) -> list[Text]:
    """At most `height` lines of at most `width` columns.

    If they do not fit, decisions are left out first, then the last jobs.
    """
    lines = [_fitted(_head(snapshot), width)]
    lines += [_fitted(Text(one.text, "red" if one.is_bad else "yellow"), width) for one in snapshot.notices]
    if snapshot.problem:
        lines.append(_fitted(Text(snapshot.problem, "bold red"), width))
    elif not snapshot.jobs:
        lines.append(Text("no job is connected", "dim"))
        lines += [_fitted(Text(f"  {command}: {purpose}"), width) for command, purpose in snapshot.next_steps]
    heads = [[_fitted(line, width) for line in _job(job, snapshot, width)] for job in snapshot.jobs]
    room = None if height is None else height - len(lines) - sum(map(len, heads))
    for at, (job, head) in enumerate(zip(snapshot.jobs, heads, strict=True)):
        share = LEAST_DECISIONS if room is None else max(0, room // (len(heads) - at))
        shown = [_fitted(line, width) for line in islice(_decisions(job), share)]
        if room is not None:
            room -= len(shown)
        lines += [*head, *shown]
    return lines if height is None else lines[:height]


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as blocks, scaled from 0 to their maximum; each block is the mean of its part."""
    width = min(width, len(values))
    top = max(values, default=0.0)
    if not top:
        return ""
    edges = [len(values) * at // width for at in range(width + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int(len(BLOCKS) * mean / top))] for mean in means)


def _head(snapshot: Snapshot) -> Text:
    line = Text("zerotune status --watch", "bold")
    if not snapshot.problem:
        memory = size_text(snapshot.resident_bytes)
        line.append(f"  {snapshot.daemon}, up {_lasting(snapshot.uptime_s)}, {memory}", "not bold")
        if snapshot.n_errors or snapshot.n_refused:
            line.append(f", {snapshot.n_errors:,} failures, {snapshot.n_refused:,} refused", "red")
    return line


def _job(job: JobView, snapshot: Snapshot, width: int) -> Iterator[Text]:
    yield Text("")
    title = Text(job.title, "bold")
    title.append(f"  {job.health}", "green" if job.is_well else "bold red")
    yield title
    yield Text(f"  {job.n_ranks_seen} of {job.n_ranks} ranks, {job.workload}, fabric {job.fabric_id}", "dim")
    facts = Text(f"  step {job.step:,}  ", "")
    facts.append(_time(job.step_us), "bold cyan")
    if job.exposed_us is not None:
        share = f" ({100 * job.exposed_us / job.step_us:.0f} %)" if job.step_us else ""
        facts.append(f"  exposed {_time(job.exposed_us)}{share}")
    else:
        facts.append(f"  exposed {job.exposure}")
    budget = "" if snapshot.budget_percent is None else f" of {snapshot.budget_percent:g}"
    facts.append(f"  exploring {job.spent_percent:.2f}{budget} %  epoch {job.epoch}")
    facts.append(f"  {job.observations_per_s:,.0f} observations/s")
    if job.n_dropped:
        facts.append(f"  {job.n_dropped:,} dropped", "yellow")
    yield facts
    if line := sparkline([one.duration_us for one in job.steps], width - 2):
        yield Text(f"  {line}", "cyan")
    for notice in job.notices:
        yield Text(f"  {notice.text}", "yellow")
    if job.gain is not None:
        yield Text(f"  {_gain(job.gain)}", "bold" if job.gain.kind is GainKind.measured else "dim")
    for key in islice(job.keys or (), MOST_KEYS):
        yield _key(key)


def _gain(gain: Gain) -> str:
    if gain.saved_percent is None:
        return gain.why if gain.kind is GainKind.no_plan else f"gain not known yet: {gain.why}"
    interval = f"{gain.saved_percent:.1f} % (95 %: {gain.low_percent:.1f} to {gain.high_percent:.1f} %)"
    return f"saved of a step: {interval}{'' if gain.kind is GainKind.measured else ', which may be noise'}"


def _key(key: KeyLine) -> Text:
    share = "   -  " if key.step_percent is None else f"{key.step_percent:4.1f} %"
    line = Text(f"  {share} {key.where}: {key.setting}")
    if key.saved_percent is not None and abs(key.saved_percent) >= LEAST_SHOWN_PERCENT:
        line.append(f", saves {key.saved_percent:.1f} % of a step", "green" if key.saved_percent > 0 else "red")
    if key.on_trial:
        line.append(f", {'next' if key.is_trial_to_come else 'trying'} {key.on_trial}", "yellow")
    return line


def _decisions(job: JobView) -> Iterator[Text]:
    for one in job.decisions or ():
        at = "" if one.step is None else f"step {one.step:,} "
        line = Text(f"  {at}", "dim")
        is_bad = one.kind == DecisionKind.rollback
        line.append(f"{one.kind} {one.setting} {one.where}".strip(), "red" if is_bad else "not dim")
        line.append(f"{': ' if one.kind else ''}{one.reason}", "dim")
        yield line


def _fitted(line: Text, width: int) -> Text:
    line = line.copy()
    line.plain = " ".join(line.plain.split("\n"))
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


def _time(us: float) -> str:
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    return f"{us / 1e3:.2f} ms" if us >= 1000 else f"{us:.0f} us"


def _lasting(s: float) -> str:
    if s < 120:
        return f"{s:.0f} s"
    return f"{s / 60:.0f} min" if s < 7200 else f"{s / 3600:.1f} h"
