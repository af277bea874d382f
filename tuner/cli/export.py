"""`zerotune export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from store.errors import UserError
from tuner.cli import completion
from tuner.cli.options import AsJson, StorePath, output_file, store_path


def export(
    out: Annotated[Path, typer.Argument(help="File to write.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="plan (for launch --plan), nvidia-csv, or measurements (.csv, or .parquet).",
            autocompletion=completion.one_of("plan", "nvidia-csv", "measurements"),
        ),
    ] = "plan",
    store: StorePath = None,
    job: Annotated[
        str | None,
        typer.Option(
            help="Job id; default: the newest job with decisions; for measurements all jobs.",
            autocompletion=completion.jobs,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take what was learned elsewhere: a plan file, NVIDIA's example-tuner CSV, or all measurements.

    Example: zerotune export plan.json && zerotune launch --plan plan.json -- torchrun train.py

    For a notebook: zerotune export measurements.parquet --to measurements
    """
    from tuner import export as exporting

    path, out = store_path(store), output_file(out)
    if to == "plan":
        remarks = exporting.export_plan(path, out, job)
    elif to == "nvidia-csv":
        remarks = exporting.export_nvidia_csv(path, out, job)
    elif to == "measurements":
        remarks = exporting.export_measurements(path, out, job)
    else:
        raise UserError(f"cannot export to {to!r}", "use plan, nvidia-csv or measurements")
    if as_json:
        import json

        print(json.dumps({"file": str(out), "format": to, "remarks": remarks}))
    else:
        print("\n".join(remarks))
