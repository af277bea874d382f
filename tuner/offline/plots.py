"""Pictures of reports as matplotlib figures, for files or for inline SVG that follows the page's theme.

Colours are those of the light theme; inline SVG replaces each by its CSS variable, so that a dark page
shows dark pictures. Text stays text, and boxes show more under the pointer.
"""

from __future__ import annotations

import contextlib
import html
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import matplotlib
import matplotlib.patches
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ...store.atomic_file import users_file
from ...store.errors import UserError
from .winners import Winner

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[Any]

INK: Final = "#1c2430"
MUTED: Final = "#66707d"
GRID: Final = "#dfe4ea"
BEFORE: Final = "#8792a0"
AFTER: Final = "#0f7b8a"
EXPOSED: Final = "#c4501b"
THEME: Final = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    BEFORE: "--before",
    AFTER: "--after",
    EXPOSED: "--exposed",
}

_WIDTH_INCHES: Final = 6.0
_SMOOTHING_STEPS: Final = 15
MAX_WIDE_COLUMNS: Final = 5
COMPUTATION: Final = "computation"
"""The lane of computation in a step's timeline; other lanes are phases of communication."""
_NARROW_INCHES: Final = 0.64
_LEAST_REM_PER_INCH: Final = 4.4
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "zerotune",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


def new_figure(height_inches: float, n_columns: int = 1, n_rows: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """An empty figure in the style of all our pictures, and its axes, row by row; `options` go to `Figure.subplots`."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
        axes = figure.subplots(n_rows, n_columns, squeeze=False, **options).ravel().tolist()
    for one in (figure, *axes):
        one.patch.set_alpha(0)
    return figure, axes


def add_box(axes: Axes, x: float, y: float, width: float, height: float, tip: str = "", **style: Any) -> None:
    """A box from (x, y) on, which does not change the axes' limits; a page shows `tip` under the pointer."""
    style.setdefault("linewidth", 0)
    axes.add_artist(matplotlib.patches.Rectangle((x, y), width, height, label=tip, **style))


def add_legend(figure: Figure, colours: Mapping[str, str]) -> None:
    """A legend of colours below all axes."""
    handles = [matplotlib.patches.Patch(color=colour, label=words) for words, colour in colours.items()]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(5, len(handles)), frameon=False, fontsize=7.5,
        labelcolor=INK,
    )  # fmt: skip


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label rows of boxes by names instead of numbers; they are centred at 0, 1, ... from the top down."""
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """Use our style, and suppress warnings about characters that the font lacks (boxes in a PNG, text in an SVG)."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """A figure as an SVG element whose colours are CSS variables; it has no width and height.

    A box's label is its title, which browsers show under the pointer. Screen readers read `description`.

    Args:
        name: unique in the page: ids within the SVG begin with it.
    """
    boxes = [one for one in figure.findobj(matplotlib.patches.Rectangle) if str(one.get_label() or "_")[0] != "_"]
    for number, box in enumerate(boxes):
        box.set_gid(f"tip-{number}")
    text = io.StringIO()
    with _drawing():
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(
        r'<g id="tip-(\d+)">',
        lambda found: f"{found[0]}<title>{html.escape(str(boxes[int(found[1])].get_label()))}</title>",
        svg,
    )
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    for colour, variable in THEME.items():
        svg = svg.replace(colour, f"var({variable})")
    # On a narrow screen the picture is wider than the screen, so that its words stay legible.
    width = f"min-width:{_LEAST_REM_PER_INCH * figure.get_figwidth():.0f}rem"
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{description}" style="{width}" ', 1)
    return svg


def save(figure: Figure, path: Path) -> None:
    """Write a picture on white as PNG or SVG, by the suffix of `path`; UserError for another suffix."""
    suffix = path.suffix.lower()
    if suffix not in (".png", ".svg"):
        raise UserError(f"cannot write a picture as {path.suffix or 'a file without suffix'}", "use .png or .svg")
    with _drawing(), users_file(path) as partial:
        metadata = {"Date": None} if suffix == ".svg" else None
        figure.savefig(partial, format=suffix[1:], dpi=180, facecolor="white", metadata=metadata)


def step_times(
    runs: Sequence[tuple[str, Array, Array]], unit_label: str = "step time", changes: Sequence[int] = ()
) -> Figure:
    """Step times of one or two runs over the steps, and their distribution in the last quarter.

    Args:
        runs: (label, step numbers (n,), duration of each step in us (n,)); the last run has the strong colour.
        changes: steps at which training or the network became slower or faster, without a plan.
    """
    figure, (over_time, spread) = new_figure(2.7, 2, width_ratios=[3, 1], sharey=True)
    colours = [BEFORE, AFTER] if len(runs) > 1 else [AFTER]
    for (label, steps, duration_us), colour in zip(runs, colours, strict=True):
        over_time.plot(steps, duration_us / 1e3, color=colour, alpha=0.35, linewidth=0.7)
        over_time.plot(steps, _smooth(duration_us) / 1e3, color=colour, linewidth=1.8, label=_plain(label))
        tail = np.sort(duration_us[-max(1, len(duration_us) // 4) :]) / 1e3
        share = np.arange(1, len(tail) + 1) / len(tail)
        spread.plot(100 * share, tail, color=colour, linewidth=1.8)
        spread.axhline(float(np.median(tail)), color=colour, linewidth=0.8, linestyle=":")
    for step in changes:
        over_time.axvline(step, color=MUTED, linewidth=1.0, linestyle="--")
    top = max(float(np.percentile(duration_us, 99)) for _, _, duration_us in runs) / 1e3
    over_time.set_ylim(0, 1.15 * top if top > 0 else 1)
    over_time.set_xlabel("step")
    over_time.set_ylabel("ms")
    _title(over_time, unit_label)
    over_time.legend(loc="lower left", ncols=2, frameon=False, labelcolor=INK)
    _title(spread, "settled")
    spread.set_xlabel("% of steps below")
    spread.set_xlim(0, 100)
    return figure


def winners(rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[Winner | None]]) -> Figure:
    """Heat map of the settings in force, coloured by their saving; predictions are hatched.

    `cells` are [row][column]; None if nothing ran.
    """
    # With many sizes, the picture gets wider, so that words still fit into cells.
    is_narrow = len(columns) > MAX_WIDE_COLUMNS
    figure, (axes,) = new_figure(0.9 + (0.75 if is_narrow else 0.6) * len(rows))
    figure.set_figwidth(max(_WIDTH_INCHES, 1.3 + _NARROW_INCHES * len(columns)))
    changes = [one.change_percent for row in cells for one in row if one is not None and one.change_percent is not None]
    top = max(5.0, -min(changes, default=0.0))
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for row in range(len(rows)):
        for column in range(len(columns)):
            winner = cells[row][column]
            if winner is None:
                continue
            share = 0.1 + 0.6 * min(max(-(winner.change_percent or 0.0) / top, 0.0), 1.0)
            is_guess = not winner.is_measured and bool(winner.change_percent)
            add_box(
                axes, column - 0.48, row - 0.45, 0.96, 0.9, winner.details(rows[row], columns[column]),
                facecolor=AFTER, alpha=share, edgecolor=MUTED, hatch="///" if is_guess else None,
            )  # fmt: skip
            words = winner.words(is_narrow=is_narrow)
            axes.text(column, row, words, ha="center", va="center", fontsize=7, color=INK, linespacing=1.2)
    name_rows(axes, rows)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_xticks(range(len(columns)), columns, fontsize=7)
    axes.tick_params(axis="x", length=0)
    _title(axes, "settings in force by message size")
    return figure


Lane = tuple[str, float, float]
"""(lane, start, end) in microseconds."""


def step_timelines(steps: Sequence[tuple[str, float, Sequence[Lane], Sequence[Lane]]], lanes: Sequence[str]) -> Figure:
    """One step per row of pictures on a common time axis, with a lane for computation and for each phase.

    Args:
        steps: (label, length, computation and communication, exposed communication).
        lanes: from the top down; `computation` has its own style.
    """
    height = 0.9 + len(steps) * (0.45 + 0.27 * len(lanes))
    figure, rows = new_figure(height, n_rows=len(steps), sharex=True)
    for axes, (label, step_us, spans, exposed) in zip(rows, steps, strict=True):
        for colour, shown in ((AFTER, spans), (EXPOSED, exposed)):
            for lane, start_us, end_us in shown:
                start, end = start_us / 1e3, end_us / 1e3
                words = f"{start:.6g} to {end:.6g} ms"
                kind = {"facecolor": BEFORE if lane == COMPUTATION else colour, "edgecolor": GRID, "linewidth": 0.3}
                add_box(axes, start, lanes.index(lane) - 0.32, end - start, 0.64, words, **kind)
        axes.axvline(step_us / 1e3, color=INK, linewidth=0.9, linestyle=":")
        name_rows(axes, [name.replace("_", " ") for name in lanes])
        _title(axes, f"{label}, {step_us / 1e3:.1f} ms")
    rows[-1].set_xlim(0, 1.02 * max(step_us for _, step_us, *_ in steps) / 1e3)
    rows[-1].set_xlabel("ms since the step began")
    kinds = {"computation": BEFORE, "communication, hidden": AFTER, "communication, exposed": EXPOSED}
    add_legend(figure, kinds if COMPUTATION in lanes else {"communication": AFTER})
    return figure


def over_steps(title: str, ylabel: str, steps: Array, values: Array, *, top: float | None = None) -> Figure:
    """One line over the steps, and its running median; both arrays have shape (n,).

    NaN leaves gaps in the line. Without `top`, the vertical axis ends at the highest value.
    """
    figure, (axes,) = new_figure(2.1)
    axes.plot(steps, values, color=AFTER, alpha=0.35, linewidth=0.7)
    axes.plot(steps, _smooth(values), color=AFTER, linewidth=1.8)
    low, high = np.nanpercentile(values, [2, 99])
    axes.set_ylim(min(0.0, float(low)), top if top is not None else max(1.0, 1.15 * float(high)))
    _title(axes, title)
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    return figure


def _title(axes: Axes, words: str) -> None:
    axes.set_title(_plain(words), loc="left", fontsize=10.5, fontweight="bold")


def _plain(words: str) -> str:
    """Escape names of jobs and runs: matplotlib would read dollar signs as formulas."""
    return words.replace("$", "\\$")


def _smooth(values: Array) -> Array:
    """Running median over about `_SMOOTHING_STEPS` steps, shorter at the ends."""
    half = min(_SMOOTHING_STEPS, max(1, len(values) // 4)) // 2
    if half == 0:
        return values
    padded = np.pad(values.astype(np.float64), half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    known = np.isfinite(windows).any(axis=1)
    smooth = np.full(len(values), np.nan)
    smooth[known] = np.nanmedian(windows[known], axis=1)
    return smooth
