"""`zerotune report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ....store.errors import UserError
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

A_TRACE = "name a folder of `launch --log-trace` with --trace"


def report(
    out: Annotated[Path, typer.Argument(help="HTML file to write.")] = Path("report.html"),
    store: StorePath = None,
    job: JobOfStore = None,
    trace: Traces = None,
    summary: Summaries = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about a job.

    Example: zerotune report report.html --trace traces/
    """
    from ...offline.report import gather, write_page

    out = output_file(out)
    if out.suffix not in ("", ".html", ".htm"):
        problem = f"a report is a page, which {out} would not show"
        raise UserError(problem, "name a file that ends in .html; `zerotune plot` writes pictures")
    facts = gather(store_path(store), job, summary or (), trace or ())
    missing = write_page(facts, out)
    if "timeline" in missing:
        print(f"zerotune: no timeline is shown: {missing['timeline']}; {A_TRACE}", file=sys.stderr)
    if as_json:
        import json

        print(json.dumps({"report": str(out)}))
    else:
        print(out)
