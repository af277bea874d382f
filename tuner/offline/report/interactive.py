"""Pictures of a report that can be hovered over and zoomed, by plotly, whose script the page carries within itself."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from markupsafe import Markup

from zerotune.store.errors import UserError
from zerotune.tuner.offline import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PIXELS_PER_INCH: Final = 96
TALLER: Final = 1.3
"""Than the picture it stands for: its legend is below."""
SMALL: Final = 10
"""Pixels of letters within boxes."""
_HOVER: Final = {
    "line": "%{x:.6~g}, %{y:.4~g}<extra></extra>",
    "bar": "%{base:.6~g} to %{x:.6~g} ms<extra></extra>",
}


def plotly_script() -> Markup:
    """The whole of plotly.js, to be put into a page.

    Returns:
        Some 5 MB.

    Raises:
        UserError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError(
            "--interactive needs plotly, which is not installed", "pip install 'zerotune[interactive]'"
        ) from None
    return Markup(get_plotlyjs())  # the package's own


def specification(figure: Figure) -> str:
    """A figure of lines, bars and boxes with words as plotly draws it.

    Args:
        figure: as `zerotune.tuner.offline.plots` makes them.

    Returns:
        JSON of `data` and `layout`.
    """
    figure.draw_without_rendering()  # its layout is known only then
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"height": round(TALLER * figure.get_figheight() * PIXELS_PER_INCH), "annotations": []}
    if any(axes.patches for axes in figure.axes):  # words within boxes do not get smaller with the screen
        layout["minwidth"] = round(figure.get_figwidth() * PIXELS_PER_INCH)
    for number, axes in enumerate(figure.axes, start=1):
        suffix = "" if number == 1 else str(number)
        place = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
        data += [{**one, **place} for one in (*_lines(axes), *_bars(axes), *_boxes(axes))]
        box = axes.get_position()
        layout[f"xaxis{suffix}"] = {
            "domain": [box.x0, box.x1], "anchor": place["yaxis"], "title": {"text": _text(axes.get_xlabel())},
            "range": list(axes.get_xlim()), **(_labels(axes.xaxis) if axes.patches else {}),
        }  # fmt: skip
        layout[f"yaxis{suffix}"] = {
            "domain": [box.y0, box.y1], "anchor": place["xaxis"], "title": {"text": _text(axes.get_ylabel())},
            "range": list(axes.get_ylim()), **(_labels(axes.yaxis) if axes.patches or axes.collections else {}),
        }  # fmt: skip
        title = {"text": _text(axes.get_title(loc="left")), "x": box.x0, "y": min(1.0, box.y1)}
        layout["annotations"].append(
            {**title, "xref": "paper", "yref": "paper", "showarrow": False, "xanchor": "left", "yanchor": "bottom"}
        )
        layout["annotations"] += [{**one, "xref": place["xaxis"], "yref": place["yaxis"]} for one in _words(axes)]
    return in_script({"data": data, "layout": layout})


def in_script(value: Any) -> str:
    """JSON in which nothing ends the script's element that holds it."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def _lines(axes: Axes) -> list[dict[str, Any]]:
    found = []
    for line in axes.get_lines():
        x, y = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
        if line.get_transform() != axes.transData:  # across the whole axes, at one step or value
            if x[0] == x[-1]:
                y = np.array(axes.get_ylim())
            else:
                x = np.array(axes.get_xlim())
        label = str(line.get_label())
        dash = {"-": "solid", ":": "dot", "--": "dash"}.get(str(line.get_linestyle()), "solid")
        found.append({
            "type": "scatter", "mode": "lines", "x": x.tolist(),
            "y": [float(value) if np.isfinite(value) else None for value in y],
            "name": "" if label.startswith("_") else _text(label), "showlegend": not label.startswith("_"),
            "line": {"color": str(line.get_color()), "width": line.get_linewidth(), "dash": dash},
            "opacity": 1.0 if line.get_alpha() is None else float(line.get_alpha() or 0),
            "hovertemplate": _HOVER["line"],
        })  # fmt: skip
    return found


def _bars(axes: Axes) -> list[dict[str, Any]]:
    from matplotlib.colors import to_hex

    found = []
    for collection in axes.collections:
        boxes = [path.get_extents() for path in collection.get_paths() if np.size(path.vertices)]
        if boxes:
            colour = to_hex(tuple(np.atleast_2d(collection.get_facecolor())[0].tolist()))
            found.append({
                "type": "bar", "orientation": "h", "showlegend": False, "width": boxes[0].height,
                "base": [box.x0 for box in boxes], "x": [box.width for box in boxes],
                "y": [(box.y0 + box.y1) / 2 for box in boxes],
                "marker": {"color": colour}, "hovertemplate": _HOVER["bar"],
            })  # fmt: skip
    return found


def _boxes(axes: Axes) -> list[dict[str, Any]]:
    """Each patch as a bar; its label is shown where it is hovered over."""
    from matplotlib.colors import to_hex
    from matplotlib.patches import Rectangle

    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    if not boxes:
        return []
    marks = [(to_hex(patch.get_facecolor()), patch.get_alpha(), "/" if patch.get_hatch() else "") for patch in boxes]
    colours, opacities, shapes = map(list, zip(*marks, strict=True))
    pattern = {"shape": shapes, "fillmode": "overlay", "fgcolor": plots.MUTED, "size": 6, "solidity": 0.2}
    return [{
        "type": "bar", "orientation": "h", "showlegend": False, "width": boxes[0].get_height(),
        "base": [box.get_x() for box in boxes], "x": [box.get_width() for box in boxes],
        "y": [box.get_y() + box.get_height() / 2 for box in boxes],
        "marker": {"color": colours, "opacity": opacities, "line": {"width": 0}, "pattern": pattern},
        "customdata": [_text(str(box.get_label())) for box in boxes], "hovertemplate": "%{customdata}<extra></extra>",
    }]  # fmt: skip


def _words(axes: Axes) -> list[dict[str, Any]]:
    return [
        {"x": x, "y": y, "text": _text(text.get_text()), "showarrow": False, "font": {"size": SMALL}}
        for text in axes.texts
        for x, y in [text.get_position()]
    ]


def _labels(axis: Axis) -> dict[str, Any]:
    """Names in place of numbers along an axis."""
    words = [_text(label.get_text()) for label in axis.get_ticklabels()]
    return {"tickvals": [float(at) for at in axis.get_ticklocs()], "ticktext": words, "showgrid": False}


def _text(words: str) -> str:
    """Words of others as they are: plotly would take what looks like markup in them for it."""
    return html.escape(words, quote=False).replace("\n", "<br>")
