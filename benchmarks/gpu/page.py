"""The run as one HTML page with pictures, which fetches nothing: what to mail."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.outcome import Outcome

STYLE = (
    "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "td{border-bottom:1px solid #ccc;padding:.3rem .6rem;vertical-align:top}svg{max-width:100%;height:auto}"
)


def page(
    title: str,
    worth: str,
    facts: Mapping[str, Any],
    told: Sequence[tuple[str, str]],
    outcomes: Mapping[str, Outcome],
) -> str:
    """The page."""
    title, pictures = html.escape(title), "".join(f"<h2>{name}</h2>{svg}" for name, svg in _pictures(outcomes))
    steps = [(name, one.outcome, f"{one.seconds:.1f} s", one.reason) for name, one in outcomes.items()]
    return (
        f"<!doctype html><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
        f"<p>{html.escape(worth)}</p><h2>Answers</h2>{_table(told)}{pictures}"
        f"<h2>Steps</h2>{_table(steps)}<h2>Where</h2>{_table([*facts.items()])}\n"
    )


def _table(rows: Sequence[Sequence[object]]) -> str:
    cells = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _pictures(outcomes: Mapping[str, Outcome]) -> Iterator[tuple[str, str]]:
    """Heading and SVG of each picture whose step has ended."""
    seen = {name: one.results for name, one in outcomes.items()}
    if by_bytes := seen.get("times", {}).get("us_by_bytes"):
        sizes = [int(size) for size in by_bytes]
        lines = {name: [us[at] for us in by_bytes.values()] for at, name in enumerate(("profiler", "events"))}
        yield "All-gather: profiler and events", _lines("bytes", sizes, lines)
    if by_channels := seen.get("beside", {}).get("us_by_channels"):
        channels = [int(n) for n in by_channels if n != "0"]
        rows = [by_channels[str(n)] for n in channels]
        names = ("gather alone", "product alone", "both")
        yield "A gather beside a matrix product", _lines(
            "channels", channels, {name: [row[at] for row in rows] for at, name in enumerate(names)}
        )


def _lines(of: str, places: Sequence[int], lines: Mapping[str, Sequence[float | None]]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, us in lines.items():
        axes.plot(places, [float("nan") if one is None else one for one in us], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(of)
    axes.set_ylabel("microseconds")
    axes.legend()
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return "<svg" + text.getvalue().partition("<svg")[2]
