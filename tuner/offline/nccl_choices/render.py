"""Choices as tables and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.console import Console
from rich.table import Table

from zerotune.tuner.offline.nccl_choices.choices import Choice, ChoiceChange, Choices
from zerotune.tuner.offline.nccl_choices.plan_check import JudgedRow, RowEffect
from zerotune.tuner.offline.plots import GRID, new_figure
from zerotune.tuner.offline.size_ranges import size_text

_COLOURS: Final = ("#0f7b8a", "#c4501b", "#5b6abf", "#b58a00", "#8792a0", "#7a3e8f", "#3f8f4f", "#b03060", "#1c2430")
_N_RIVALS: Final = 3
_N_TICKS: Final = 7
_WORDS: Final = {
    RowEffect.applies: "applies",
    RowEffect.fewer_channels: "applies, on fewer channels",
    RowEffect.ignored: "does nothing: NCCL does not offer it here",
    RowEffect.never_matches: "does nothing: no call here can match it",
}


def headline(found: Choices) -> str:
    """Who decided, and where."""
    ranks = f"{found.n_nodes} x {found.ranks_per_node} ranks"
    return f"NCCL {found.nccl} on {found.topology}, {ranks} (its own library, no GPU: choices and estimates, no times)"


def choices_table(found: Choices) -> Table:
    """One line per collective and size."""
    table = Table("collective", "size", "NCCL takes", "its estimate", "next best", title=headline(found))
    for choice in found.choices:
        estimate = "" if choice.estimate_us is None else f"{choice.estimate_us:,.1f} us"
        rivals = [
            offer for offer in choice.offers if (offer.algorithm, offer.protocol) != (choice.algorithm, choice.protocol)
        ]
        text = ", ".join(f"{one.algorithm}/{one.protocol} {one.estimate_us:,.1f}" for one in rivals[:_N_RIVALS])
        table.add_row(choice.collective, size_text(choice.message_bytes), choice.setting(), estimate, text)
    return table


def changes_table(before: Choices, after: Choices, changed: Sequence[ChoiceChange]) -> Table:
    """What an upgrade changes.

    Args:
        before: choices of one release.
        after: choices of the other.
        changed: where they differ.

    Returns:
        One line per call that is treated otherwise.
    """
    title = f"{len(changed)} of {len(before.choices)} calls change from NCCL {before.nccl} to {after.nccl}"
    table = Table("collective", "size", f"NCCL {before.nccl}", f"NCCL {after.nccl}", title=title)
    for change in changed:
        size = size_text(change.before.message_bytes)
        table.add_row(change.before.collective, size, change.before.setting(), change.after.setting())
    return table


def plan_table(judged: Sequence[JudgedRow]) -> Table:
    """One line per row of the plan."""
    n_idle = sum(not row.effect.does_something for row in judged)
    title = f"{n_idle} of {len(judged)} rows do nothing"
    table = Table("row", "collective", "phase", "sizes", "asks for", "runs", "effect", title=title)
    for row in judged:
        sizes = f"{size_text(row.min_bytes)} to {size_text(row.max_bytes)}"
        cells = (str(row.row), row.collective, row.phase, sizes, row.asked, row.ran or "", _WORDS[row.effect])
        table.add_row(*cells, style=None if row.effect.does_something else "yellow")
    return table


def show(tables: Sequence[Table], console: Console) -> None:
    """Print tables."""
    for table in tables:
        console.print(table)


def picture(found: Choices) -> Figure:
    """A band per collective: colour is algorithm and protocol, the number in it the channels."""
    collectives = list(dict.fromkeys(choice.collective for choice in found.choices))
    settings = list(dict.fromkeys(_cell(choice) for choice in found.choices))
    colours = {setting: _COLOURS[place % len(_COLOURS)] for place, setting in enumerate(settings)}
    figure, (axes,) = new_figure(1.2 + 0.55 * len(collectives))
    axes.grid(visible=False)
    sizes = list(dict.fromkeys(choice.message_bytes for choice in found.choices))
    for choice in found.choices:
        _band(axes, choice, sizes.index(choice.message_bytes), collectives.index(choice.collective), colours)
    axes.set_xlim(0, len(sizes))
    axes.set_ylim(len(collectives), 0)
    axes.set_yticks([place + 0.5 for place in range(len(collectives))], collectives)
    every = -(-len(sizes) // _N_TICKS)
    axes.set_xticks(
        [place + 0.5 for place in range(0, len(sizes), every)], [size_text(size) for size in sizes[::every]]
    )
    ranks = f"{found.n_nodes} x {found.ranks_per_node} ranks"
    axes.set_title(f"What NCCL {found.nccl} takes on {found.topology}, {ranks}", loc="left")
    handles = [axes.scatter([], [], marker="s", color=colour, label=setting) for setting, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False)
    return figure


def _cell(choice: Choice) -> str:
    return "not shown" if choice.algorithm is None else f"{choice.algorithm}/{choice.protocol}"


def _band(axes: Any, choice: Choice, column: int, line: int, colours: dict[str, str]) -> None:
    axes.add_patch(_box(column, line, colours[_cell(choice)]))
    if choice.n_channels:
        axes.text(column + 0.5, line + 0.5, str(choice.n_channels), color="white", ha="center", va="center", fontsize=7)


def _box(column: int, line: int, colour: str) -> Rectangle:
    return Rectangle((column, line + 0.08), 1, 0.84, facecolor=colour, edgecolor=GRID, linewidth=0.4)
