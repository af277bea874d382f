"""`zerotune plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from store.errors import UserError
from tuner.cli import completion
from tuner.cli.options import AsJson, StorePath, output_file, store_path
from tuner.cli.report import Summaries, Traces


def plot(
    name: Annotated[
        str,
        typer.Argument(
            help="steps, exposed, timeline, winners, regret, memory; `list` shows them.",
            autocompletion=completion.one_of("steps", "exposed", "timeline", "winners", "regret", "memory", "list"),
        ),
    ],
    out: Annotated[Path, typer.Argument(help="A .png or .svg file.")] = Path("plot.png"),
    store: StorePath = None,
    job: Annotated[
        str | None, typer.Option(help="Job id; default: the newest job.", autocompletion=completion.jobs)
    ] = None,
    trace: Traces = None,
    summary: Summaries = None,
    as_json: AsJson = False,
) -> None:
    """Write one picture of the report as PNG or SVG.

    Example: zerotune plot winners winners.svg
    """
    import json

    from tuner.plots import save
    from tuner.report.facts import gather
    from tuner.report.page import pictures

    found = {picture.name: picture for picture in pictures(gather(store_path(store), job, summary or (), trace or ()))}
    if name == "list":
        print(json.dumps(list(found)) if as_json else "\n".join(found))
    elif name in found:
        save(found[name].figure, output_file(out))
        print(json.dumps({"picture": str(out)}) if as_json else out)
    elif name == "timeline" and not trace:
        raise UserError("the timeline needs a trace", "name a folder of `launch --log-trace` with --trace")
    else:
        raise UserError(f"there is no picture {name!r} of this job", f"use one of {', '.join(found) or 'none'}")
