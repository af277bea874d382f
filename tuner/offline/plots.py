"""The single pictures of reports, as matplotlib figures: for inline SVG that follows the page's theme, or files.

Colours are those of the light theme; inline SVG replaces each by its CSS variable, so that a dark page
shows dark pictures. Text stays text.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import matplotlib
import matplotlib.patches
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from zerotune.store.atomic_file import users_file
from zerotune.store.errors import UserError
from zerotune.tuner.offline.winners import Winner

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


def new_figure(height_inches: float, n_columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """An empty figure in the style of all our pictures.

    Args:
        n_columns: axes side by side.
        options: further arguments of matplotlib's `Figure.subplots`.

    Returns:
        The figure and its axes, shape (n_columns,).
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
        axes = figure.subplots(1, n_columns, squeeze=False, **options)[0]
    figure.patch.set_alpha(0)
    for one in axes:
        one.patch.set_alpha(0)
    return figure, list(axes)


def new_rows(heights_inches: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """An empty figure of axes one above the other, in the style of all our pictures.

    Args:
        heights_inches: of each, without its labels.

    Returns:
        The figure and its axes, from the top.
    """
    with matplotlib.rc_context(_STYLE):
        height = sum(heights_inches) + 0.6 * (len(heights_inches) + 1)
        figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
        axes = figure.subplots(len(heights_inches), 1, squeeze=False, height_ratios=heights_inches)[:, 0]
    return figure, list(axes)


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """Our style, and silence about characters of names that the font lacks: boxes in a PNG, text in an SVG."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """A figure as an SVG element whose colours are CSS variables.

    Args:
        name: unique in the page: ids within the SVG begin with it.
        description: text for screen readers.

    Returns:
        The element, without width and height.
    """
    text = io.StringIO()
    with _drawing():
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    for colour, variable in THEME.items():
        svg = svg.replace(colour, f"var({variable})")
    # On a narrow screen it is wider than that, rather than its words too small to be read.
    width = f"min-width:{_LEAST_REM_PER_INCH * figure.get_figwidth():.0f}rem"
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{description}" style="{width}" ', 1)
    return svg


def save(figure: Figure, path: Path) -> None:
    """Write a picture as PNG or SVG, by the suffix of `path`, on white.

    Raises:
        UserError: another suffix, or the file cannot be written.
    """
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
        changes: steps at which the pace or the network changed, without a plan.
    """
    figure, (over_time, spread) = new_figure(2.7, 2, width_ratios=[3, 1], sharey=True)
    colours = [BEFORE, AFTER] if len(runs) > 1 else [AFTER]
    for (label, steps, duration_us), colour in zip(runs, colours, strict=True):
        over_time.plot(steps, duration_us / 1e3, color=colour, alpha=0.35, linewidth=0.7)
        over_time.plot(steps, _smooth(duration_us) / 1e3, color=colour, linewidth=1.8, label=label)
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
    """Heat map of the settings in force, coloured by what they save; predictions are hatched.

    Args:
        cells: [row][column]; None where nothing ran.
    """
    # Many sizes make the picture wider, not the cells too narrow for their words.
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
            patch = matplotlib.patches.Rectangle(
                (column - 0.48, row - 0.45), 0.96, 0.9, facecolor=AFTER, alpha=share, linewidth=0,
                edgecolor=MUTED, hatch="///" if is_guess else None, label=winner.details(rows[row], columns[column]),
            )  # fmt: skip
            axes.add_patch(patch)
            words = winner.words(is_narrow=is_narrow)
            axes.text(column, row, words, ha="center", va="center", fontsize=7, color=INK, linespacing=1.2)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns, fontsize=7)
    axes.set_yticks(range(len(rows)), rows, fontsize=7.5)
    axes.tick_params(length=0)
    _title(axes, "settings in force by message size")
    return figure


Lane = tuple[str, float, float]
"""(lane, start, end) in microseconds."""


def step_timelines(
    steps: Sequence[tuple[str, float, Sequence[tuple[float, float]], Sequence[Lane], Sequence[Lane]]],
    lanes: Sequence[str],
) -> Figure:
    """One step per row of pictures on a common time axis: computation, then one lane per phase of communication.

    `steps` holds (label, length, computation, communication, exposed communication).
    """
    has_computation = any(computation for _, _, computation, _, _ in steps)
    names = [*(["computation"] if has_computation else []), *lanes]
    figure, _ = new_figure(0.5)
    figure.clear()
    figure.set_size_inches(_WIDTH_INCHES, 0.9 + len(steps) * (0.45 + 0.27 * len(names)))
    with matplotlib.rc_context(_STYLE):
        rows = figure.subplots(len(steps), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (label, step_us, computation, communication, exposed) in zip(rows, steps, strict=True):
        axes.patch.set_alpha(0)
        axes.grid(visible=False, axis="y")
        if has_computation:
            axes.broken_barh([(start / 1e3, (end - start) / 1e3) for start, end in computation], (-0.32, 0.64),
                             facecolors=BEFORE, linewidth=0)  # fmt: skip
        for colour, spans in ((AFTER, communication), (EXPOSED, exposed)):
            for at, lane in enumerate(names):
                bars = [(start / 1e3, (end - start) / 1e3) for name, start, end in spans if name == lane]
                axes.broken_barh(bars, (at - 0.32, 0.64), facecolors=colour, edgecolors=GRID, linewidth=0.3)
        axes.axvline(step_us / 1e3, color=INK, linewidth=0.9, linestyle=":")
        axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names], fontsize=7.5)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        _title(axes, f"{label}, {step_us / 1e3:.1f} ms")
    rows[-1].set_xlim(0, 1.02 * max(step_us for _, step_us, *_ in steps) / 1e3)
    rows[-1].set_xlabel("ms since the step began")
    kinds = [(BEFORE, "computation"), (AFTER, "communication, hidden"), (EXPOSED, "communication, exposed")]
    if not has_computation:
        kinds = [(AFTER, "communication")]
    handles = [matplotlib.patches.Patch(color=colour, label=words) for colour, words in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=7.5, labelcolor=INK)
    return figure


def over_steps(title: str, ylabel: str, steps: Array, values: Array, *, top: float | None = None) -> Figure:
    """One line over the steps, and its running median.

    Args:
        steps: step numbers, shape (n,).
        values: shape (n,); NaN leaves gaps.
        top: end of the vertical axis; None: chosen by the values.
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
    axes.set_title(words, loc="left", fontsize=10.5, fontweight="bold")


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
