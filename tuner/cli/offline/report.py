"""`zerotune report`: a page about a job, or one of its pictures."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ....store.errors import UserError
from .. import completion
from ..options import AsJson, JobOfStore, StorePath
from ..paths import output_file, store_path

Traces = Annotated[
    list[Path] | None,
    typer.Option("--trace", help="Folder of `launch --log-trace`, for the timeline; or two: before and after."),
]
Summaries = Annotated[
    list[Path] | None,
    typer.Option("--summary", help="File of `launch --summary`; give two: before and after."),
]

NAMES = ("steps", "exposed", "timeline", "ranks", "winners", "regret", "memory")
_OF_TRACES = ("timeline", "ranks")
A_TRACE = "name a folder of `launch --log-trace` with --trace"


def report(
    out: Annotated[
        Path | None,
        typer.Argument(help="File to write: .html, with --plot .png or .svg.", show_default="report.html"),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(
            help=f"Write only this picture: {', '.join(NAMES)}; `list` shows which of them this job has.",
            autocompletion=completion.one_of(*NAMES, "list"),
        ),
    ] = None,
    store: StorePath = None,
    job: JobOfStore = None,
    trace: Traces = None,
    summary: Summaries = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about a job, or one of its pictures.

    Example: zerotune report report.html --trace traces/

    One picture: zerotune report winners.svg --plot winners
    """
    from ...offline.report import gather, write_page

    if plot is not None:
        _plot(plot, out, store_path(store), job, summary or (), trace or (), as_json)
        return
    out = output_file(out or Path("report.html"))
    if out.suffix not in ("", ".html", ".htm"):
        problem = f"a report is a page, which {out} would not show"
        raise UserError(problem, "name a file that ends in .html, or a picture with --plot")
    facts = gather(store_path(store), job, summary or (), trace or ())
    missing = write_page(facts, out)
    if "timeline" in missing:
        print(f"zerotune: no timeline is shown: {missing['timeline']}; {A_TRACE}", file=sys.stderr)
    if as_json:
        import json

        print(json.dumps({"report": str(out)}))
    else:
        print(out)


def _plot(
    name: str,
    out: Path | None,
    store: Path,
    job: str | None,
    summary: Sequence[Path],
    trace: Sequence[Path],
    as_json: bool,
) -> None:
    import json

    from ...offline.plots import save
    from ...offline.report.facts import TRAIN_FIRST, gather, untrained
    from ...offline.report.pictures import pictures

    if name not in (*NAMES, "list"):
        raise UserError(f"there is no picture {name!r}", f"use one of {', '.join(NAMES)}")
    facts = gather(store, job, summary, trace)
    drawn, missing = pictures(facts)
    found = {picture.name: picture for picture in drawn}
    if name == "list":
        print(json.dumps(list(found)) if as_json else "\n".join(_line(one, found) for one in NAMES))
    elif name in found:
        out = output_file(out or Path(f"{name}.png"))
        save(found[name].figure, out)
        print(json.dumps({"picture": str(out)}) if as_json else out)
    elif name in _OF_TRACES:
        what = "timeline" if name == "timeline" else "picture of the ranks"
        raise UserError(f"there is no {what}: {missing[name]}" if trace else f"the {what} needs a trace", A_TRACE)
    else:
        if not facts.is_of_training:
            raise untrained(facts)
        remedy = f"use one of {', '.join(found)}" if found else TRAIN_FIRST
        raise UserError(f"this job has nothing for the picture {name!r}", remedy)


def _line(name: str, found: Container[str]) -> str:
    if name in found:
        return name
    reason = "needs a folder of `launch --log-trace`: --trace" if name in _OF_TRACES else "nothing recorded in this job"
    return f"{name}  ({reason})"
