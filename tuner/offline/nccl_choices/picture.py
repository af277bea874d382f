"""Choices as a picture."""

from __future__ import annotations

from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerotune.tuner.offline.nccl_choices.choices import Choice, Choices
from zerotune.tuner.offline.plots import GRID, new_figure
from zerotune.tuner.offline.size_ranges import size_text

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
