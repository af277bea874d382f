"""`zerotune report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from zerotune.tuner.cli.options import AsJson, JobOfStore, StorePath
from zerotune.tuner.cli.paths import output_file, store_path

Traces = Annotated[
    list[Path] | None,
    typer.Option("--trace", help="Folder of `launch --log-trace`, for the timeline; or two: before and after."),
]
Summaries = Annotated[
    list[Path] | None,
    typer.Option("--summary", help="File of `launch --summary`; give two: before and after."),
]

A_TRACE = "name a folder of `launch --log-trace` with --trace"


def report(
    out: Annotated[Path, typer.Argument(help="HTML file to write.")] = Path("report.html"),
    store: StorePath = None,
    job: JobOfStore = None,
    trace: Traces = None,
    summary: Summaries = None,
    interactive: Annotated[
        bool,
        typer.Option("--interactive", help="Pictures to hover over and to zoom, and a trace's ranks: some 5 MB more."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about a job.

    Example: zerotune report report.html --trace traces/
    """
    from zerotune.tuner.offline.report import gather, write_page
    from zerotune.tuner.offline.report.page import missing_timeline

    facts = gather(store_path(store), job, summary or (), trace or ())
    written = write_page(facts, output_file(out), is_interactive=interactive)
    if missing := missing_timeline(facts):
        print(f"zerotune: no timeline is shown: {missing}; {A_TRACE}", file=sys.stderr)
    if as_json:
        import json

        print(json.dumps({"report": str(written)}))
    else:
        print(written)
