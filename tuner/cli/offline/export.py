"""`zerotune export`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
            help="plan (for launch --plan, .json), nvidia-csv, measurements (.csv, or .parquet), or chrome: a timeline"
            " for Perfetto and chrome://tracing (.json, or .json.gz).",
            autocompletion=completion.one_of("plan", "nvidia-csv", "measurements", "chrome"),
        ),
    ] = "plan",
    store: StorePath = None,
    job: Annotated[
        str | None,
        typer.Option(
            help="Job id or name; default: the newest that adopted a plan; for measurements all jobs; for chrome the"
            " newest that trained.",
            autocompletion=completion.jobs,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Folder of `launch --log-trace`: chrome draws every rank, each collective where it ran."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take what was learned elsewhere: a plan file, NVIDIA's example-tuner CSV, all measurements, or a timeline.

    Example: zerotune export plan.json && zerotune launch --plan plan.json -- torchrun train.py

    For a notebook: zerotune export measurements.parquet --to measurements

    For Perfetto: zerotune export timeline.json.gz --to chrome --trace traces/
    """
    from zerotune.tuner.offline import export as exporting
    from zerotune.tuner.offline.chrome_trace import export_chrome_trace

    formats: dict[str, Callable[[Path, Path, str | None], list[str]]] = {
        "plan": exporting.export_plan,
        "nvidia-csv": exporting.export_nvidia_csv,
        "measurements": exporting.export_measurements,
        "chrome": partial(export_chrome_trace, trace=trace),
    }
    write = formats.get(to)
    if write is None:
        raise UserError(f"cannot export to {to!r}", "use plan, nvidia-csv, measurements or chrome (for Perfetto)")
    if trace is not None and to != "chrome":
        raise UserError(f"--trace is of no use for {to}", "use it with --to chrome")
    out = output_file(out)
    exporting.check_suffix(out, to)
    is_replaced = out.is_file()
    remarks = write(store_path(store), out, job)
    if is_replaced:
        remarks.append("It replaces the file that was there.")
    if as_json:
        import json

        print(json.dumps({"file": str(out), "format": to, "remarks": remarks}))
    else:
        print("\n".join(remarks))
