"""`zerotune report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli.options import StorePath, output_file, store_path


def report(
    out: Annotated[Path, typer.Argument(help="HTML file to write.")] = Path("report.html"),
    store: StorePath = None,
    job: Annotated[str | None, typer.Option(help="Job id; default: the newest job.")] = None,
) -> None:
    """Write one self-contained HTML page about a job.

    Example: zerotune report report.html
    """
    from tuner.report import write_report

    print(write_report(store_path(store), output_file(out), job_id=job))
