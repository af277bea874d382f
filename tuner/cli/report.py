"""`zerotune report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli import completion
from tuner.cli.options import AsJson, StorePath, output_file, store_path

Traces = Annotated[
    list[Path] | None,
    typer.Option("--trace", help="Folder of `launch --log-trace`, for the timeline; or two: before and after."),
]
Summaries = Annotated[
    list[Path] | None,
    typer.Option("--summary", help="File of `launch --summary`; give two: before and after."),
]


def report(
    out: Annotated[Path, typer.Argument(help="HTML file to write.")] = Path("report.html"),
    store: StorePath = None,
    job: Annotated[
        str | None, typer.Option(help="Job id; default: the newest job that trained.", autocompletion=completion.jobs)
    ] = None,
    trace: Traces = None,
    summary: Summaries = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about a job.

    Example: zerotune report report.html --trace traces/
    """
    from tuner.report import write_report

    written = write_report(store_path(store), output_file(out), job, summary or (), trace or ())
    if as_json:
        import json

        print(json.dumps({"report": str(written)}))
    else:
        print(written)
