"""Prints a sweep's progress and its result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ....store.counted import counted, faster
from ....store.records import CommunicatorClass
from ..emulated_note import emulated_note
from .result import SweepResult, SweepRow
from .run import Progress as Callback
from .unvisited import Unvisited, Why

MAX_PER_PLACE = 4
WIDE = 140
"""Columns of a terminal on which all figures fit."""
WHY: Final = {
    Why.slower: "that should be slower than the choice of their size, as samples of others show",
    Why.tie: "that should be as fast as the choice of their size, within --half-width",
    Why.budget: "for which --samples-share had no sample left",
    Why.known: "that an earlier sweep measured",
    Why.broken: "that broke before, or whose kind did",
}
MAX_NAMED: Final = 4
LEFT_OUT_IF_NARROW = ("collective", "95 %", "algbw", "n")
"""Columns left out on narrow terminals; the collective then has a line of its own."""


@contextmanager
def progress_bar(console: Console) -> Iterator[Callback]:
    """A bar with the remaining time; yields the callback that moves it. Files and pipes get no bar."""
    if not console.is_terminal:
        yield lambda done, total, description: None
        return
    columns = (
        TextColumn("sweep"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("[dim]{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def move(done: int, total: int, description: str) -> None:
            bar.update(task, completed=done, total=total, description=description)

        yield move


def render(result: SweepResult, console: Console, *, max_per_place: int = MAX_PER_PLACE) -> None:
    """Print the fastest settings and NCCL's own choice by size, in the columns of nccl-tests."""
    if result.emulated:
        console.print(emulated_note(result.emulated))
    if result.rows:
        console.print(_table(result, max_per_place, is_narrow=console.width < WIDE))
    words = f"{result.n_visited} of {result.n_cells} settings visited, {counted(result.n_samples, 'sample')}"
    words += f" in {result.wall_s:.1f} s"
    if result.n_restored:
        words += f"; {result.n_restored:,} samples of earlier sweeps were not measured again"
    if result.n_broken:
        words += f"; [red]{counted(result.n_broken, 'setting')} hung or failed[/]"
    console.print(f"{words}. {f'Recorded as {result.job_id}.' if result.job_id else 'Nothing new was measured.'}")
    for words in _why_unvisited(result.unvisited):
        console.print(words, highlight=False)
    if result.gave_up:
        console.print(
            "[red]Given up[/]: so many settings hang or fail that something else is wrong. What was measured is kept;"
            " the same command goes on without what broke, --fresh tries all again."
        )
    elif result.n_unsettled and not result.interrupted:
        console.print(
            f"[yellow]{result.n_unsettled} choices are not sure[/]: the budget ran out before. The same command with a "
            "larger --samples-share goes on from here; --full measures every setting."
        )
    if n_hidden := sum(not shown for _, shown in _shown(result, max_per_place)):
        console.print(f"[dim]{n_hidden} slower settings are left out; --json has all.[/]")
    if _is_beaten(result):
        console.print(
            "[dim]A best may stand beside one that few samples show as faster: neighbouring sizes count, too, and "
            "differences within --half-width are ties.[/]"
        )
    if any(row.n_samples == 0 and row.outcome == "ok" for row in result.rows):
        console.print(
            "[dim]~: not measured there; follows from NCCL's cost and from what neighbouring sizes showed.[/]"
        )
    if result.interrupted:
        console.print(f"[yellow]Interrupted[/]{_how_far(result)}")


def _why_unvisited(unvisited: Sequence[Unvisited]) -> Iterator[str]:
    """A line for each reason but interruption: the number of settings, and their names if they are few."""
    for why, words in WHY.items():
        found = [one for one in unvisited if one.why is why]
        if not found:
            continue
        percents = [one.slower_percent for one in found if one.slower_percent is not None]
        if why is Why.slower and percents:
            low, high = min(percents), max(percents)
            words += f", by {low:.0f}" + (f" to {high:,.0f} %" if round(high) > round(low) else " %")
        which = ""
        if len(found) <= MAX_NAMED:
            named = (f"{one.collective} {one.message_bytes:,} {_setting(one.setting)}" for one in found)
            which = f": {', '.join(named)}"
        yield f"not visited: {len(found):,} {words}{which}"


def _table(result: SweepResult, max_per_place: int, *, is_narrow: bool) -> Table:
    headings = (
        "collective", "bytes", "setting", "time (us)", "95 %", "algbw", "busbw", "change of time", "n", "verdict",
    )  # fmt: skip
    kept = [at for at, name in enumerate(headings) if not (is_narrow and name in LEFT_OUT_IF_NARROW)]
    table = Table(
        *(headings[at] for at in kept),
        title=f"{CommunicatorClass(result.n_ranks, result.n_nodes)}; bandwidths in GB/s as nccl-tests computes them",
        box=None if is_narrow else box.HEAVY_HEAD,
        padding=(0, 1, 0, 0 if is_narrow else 1),
    )
    table.columns[kept.index(headings.index("setting"))].no_wrap = True
    own_expected = {
        (row.collective, row.message_bytes)
        for row in result.rows
        if row.setting == "baseline" and row.median_us is None
    }
    last = None
    for row, shown in _shown(result, max_per_place):
        place = (row.collective, row.message_bytes)
        if shown:
            if is_narrow and (last is None or last[0] != row.collective):
                table.add_row(row.collective)
            cells = _cells(row, is_first=place != last, is_gain_expected=place in own_expected)
            table.add_row(*(cells[at] for at in kept))
        last = place
    return table


def _shown(result: SweepResult, max_per_place: int) -> Iterator[tuple[SweepRow, bool]]:
    """Every row, and whether it is shown: the first of a size, NCCL's own choice, and broken settings."""
    place, n_shown = None, 0
    for row in result.rows:
        if (row.collective, row.message_bytes) != place:
            place, n_shown = (row.collective, row.message_bytes), 0
        shown = n_shown < max_per_place or row.setting == "baseline" or row.outcome != "ok"
        n_shown += shown
        yield row, shown


def _is_beaten(result: SweepResult) -> bool:
    """Whether a best setting was measured slower than another setting of its size."""
    fastest_us: dict[tuple[str, int], float] = {}
    for row in result.rows:
        if row.median_us is not None and row.outcome == "ok":
            place = (row.collective, row.message_bytes)
            fastest_us[place] = min(row.median_us, fastest_us.get(place, row.median_us))
    return any(
        row.is_best and row.median_us is not None and row.median_us > fastest_us[row.collective, row.message_bytes]
        for row in result.rows
    )


def _how_far(result: SweepResult) -> str:
    """The results of an interrupted sweep, as text."""
    goes_on = "The same command goes on from here."
    if not result.rows:
        return f" before anything was measured. {goes_on}"
    n_begun = len({(row.collective, row.message_bytes) for row in result.rows})
    words = f": {n_begun} of {result.n_places} sizes have measurements"
    if result.n_compared < n_begun:
        words += f", {result.n_compared} of them enough to name a best setting"
    return f"{words}. All of it is kept. {goes_on}"


def _cells(row: SweepRow, *, is_first: bool, is_gain_expected: bool) -> tuple[str, ...]:
    head = (row.collective, f"{row.message_bytes:,}") if is_first else ("", "")
    setting = _setting(row.setting)
    if row.outcome != "ok":
        return (*head, setting, "-", "-", "-", "-", "-", str(row.n_samples), f"[red]{row.outcome}: {row.reason}[/]")
    time_us = row.expected_us if row.median_us is None else row.median_us
    about = "~" if row.median_us is None else ""
    about_gain = "~" if is_gain_expected else about
    interval = "-" if row.low_us is None or row.high_us is None else f"{row.low_us:.1f}..{row.high_us:.1f}"
    is_compared = row.gain_percent is not None and row.setting != "baseline"
    change = f"{about_gain}{faster(-(row.gain_percent or 0.0), 1)}" if is_compared else ""
    return (
        *head,
        f"[bold]{setting}[/]" if row.is_best else setting,
        f"{about}{time_us:.2f}",
        interval,
        f"{about}{_rate(row.algbw_gbs)}",
        f"{about}{_rate(row.busbw_gbs)}",
        change,
        str(row.n_samples),
        _verdict(row),
    )


def _setting(setting: str) -> str:
    return "NCCL's own" if setting == "baseline" else setting


def _rate(gbs: float | None) -> str:
    if gbs is None:
        return "-"
    return f"{gbs:.2f}" if gbs >= 0.1 else f"{gbs:.2g}"


def _verdict(row: SweepRow) -> str:
    word = "best" if row.is_best else "a guess"
    if row.confidence is None:
        return word if row.is_best else ""
    # The number of draws shows no more than that.
    return f"{word}, {'> 99' if row.confidence >= 0.995 else f'{100 * row.confidence:.0f}'} % sure"
