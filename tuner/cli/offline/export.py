"""`zerotune export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerotune.store.errors import UserError
from zerotune.tuner.cli import completion
from zerotune.tuner.cli.options import AsJson, StorePath
from zerotune.tuner.cli.paths import output_file, store_path


def export(
    out: Annotated[Path, typer.Argument(help="File to write.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="plan (for launch --plan, .json), nvidia-csv, or measurements (.csv, or .parquet).",
            autocompletion=completion.one_of("plan", "nvidia-csv", "measurements"),
        ),
    ] = "plan",
    store: StorePath = None,
    job: Annotated[
        str | None,
        typer.Option(
            help="Job id or name; default: the newest that adopted a plan; for measurements all jobs.",
            autocompletion=completion.jobs,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take what was learned elsewhere: a plan file, NVIDIA's example-tuner CSV, or all measurements.

    Example: zerotune export plan.json && zerotune launch --plan plan.json -- torchrun train.py

    For a notebook: zerotune export measurements.parquet --to measurements
    """
    from zerotune.tuner.offline import export as exporting

    write = {
        "plan": exporting.export_plan,
        "nvidia-csv": exporting.export_nvidia_csv,
        "measurements": exporting.export_measurements,
    }.get(to)
    if write is None:
        raise UserError(f"cannot export to {to!r}", "use plan, nvidia-csv or measurements")
    out = output_file(out)
    exporting.check_suffix(out, to)
    remarks = write(store_path(store), out, job)
    if as_json:
        import json

        print(json.dumps({"file": str(out), "format": to, "remarks": remarks}))
    else:
        print("\n".join(remarks))
