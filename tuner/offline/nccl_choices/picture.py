"""Draws choices."""

from __future__ import annotations

from typing import Final

from matplotlib.figure import Figure

from ....store.counted import size_text
from ..plots import GRID, add_box, add_legend, name_rows, new_figure
from .choices import Choice, Choices

_COLOURS: Final = ("#0f7b8a", "#c4501b", "#5b6abf", "#b58a00", "#8792a0", "#7a3e8f", "#3f8f4f", "#b03060", "#1c2430")
_N_TICKS: Final = 7


def picture_of(found: Choices) -> Figure:
    """A band per collective: colour is algorithm and protocol, the number in it the channels."""
    collectives = list(dict.fromkeys(choice.collective for choice in found.choices))
    settings = list(dict.fromkeys(_cell(choice) for choice in found.choices))
    colours = {setting: _COLOURS[place % len(_COLOURS)] for place, setting in enumerate(settings)}
    figure, (axes,) = new_figure(1.2 + 0.55 * len(collectives))
    axes.grid(visible=False)
    sizes = list(dict.fromkeys(choice.message_bytes for choice in found.choices))
    for choice in found.choices:
        column, row = sizes.index(choice.message_bytes), collectives.index(choice.collective)
        colour = colours[_cell(choice)]
        add_box(axes, column - 0.5, row - 0.42, 1, 0.84, facecolor=colour, edgecolor=GRID, linewidth=0.4)
        if choice.n_channels:
            axes.text(column, row, str(choice.n_channels), color="white", ha="center", va="center", fontsize=7)
    name_rows(axes, collectives)
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    ticks = range(0, len(sizes), -(-len(sizes) // _N_TICKS))
    axes.set_xticks(ticks, [size_text(sizes[place]) for place in ticks])
    ranks = f"{found.n_nodes} x {found.ranks_per_node} ranks"
    axes.set_title(f"What NCCL {found.nccl} takes on {found.topology}, {ranks}", loc="left")
    add_legend(figure, colours)
    return figure


def _cell(choice: Choice) -> str:
    return "not shown" if choice.algorithm is None else f"{choice.algorithm}/{choice.protocol}"
