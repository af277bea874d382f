"""`zerotune store export`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from ....store.counted import counted
from ....store.errors import UserError
from .. import completion
from ..options import AsJson, StorePath
from ..paths import output_file, store_path

_TABLES: Final = ("nvidia-csv", "rccl-csv", "ncclx-csv", "ncclx-json")


def export(
    out: Annotated[Path, typer.Argument(help="File to write.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="plan (for launch --plan, .json); nvidia-csv, rccl-csv, ncclx-csv or ncclx-json for other tuners;"
            " measurements (.csv, or .parquet); environment (.env); or chrome: a timeline for Perfetto and"
            " chrome://tracing (.json, or .json.gz).",
            metavar="FORMAT",
            autocompletion=completion.one_of("plan", *_TABLES, "measurements", "environment", "chrome"),
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
        typer.Option(help="Folder of `launch --log-trace`: chrome draws every rank and collective."),
    ] = None,
    book: Annotated[
        str | None,
        typer.Option("--book", help="A book of the fleet (file or URL): export its winners, not a job's."),
    ] = None,
    book_key: Annotated[
        str | None,
        typer.Option("--book-key", help="Public key that must have signed it: the .pub file, or its digits."),
    ] = None,
    fabric_id: Annotated[
        str | None, typer.Option("--fabric-id", help="For a book with several fabrics: the one to export.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export results for use elsewhere: a plan file, another tuner's table, all measurements, or a timeline.

    Example: zerotune store export plan.json && zerotune launch --plan plan.json -- torchrun train.py

    For a notebook: zerotune store export measurements.parquet --to measurements

    For RCCL, what a fleet learned: zerotune store export tuner.csv --to rccl-csv --book fleet.book

    For Perfetto: zerotune store export timeline.json.gz --to chrome --trace traces/
    """
    from ...environment import shown as environment
    from ...offline import export as exporting
    from ...offline.chrome_trace import export_chrome_trace

    formats: dict[str, Callable[[Path, Path, str | None], list[str]]] = {
        "plan": exporting.export_plan,
        **{name: partial(exporting.export_table, name) for name in _TABLES},
        "measurements": exporting.export_measurements,
        "environment": environment.export,
        "chrome": partial(export_chrome_trace, trace=trace),
    }
    write = formats.get(to)
    if write is None:
        named = f"plan, {', '.join(_TABLES)}, measurements, environment or chrome (for Perfetto)"
        raise UserError(f"cannot export to {to!r}", f"use {named}")
    if trace is not None and to != "chrome":
        raise UserError(f"--trace is of no use for {to}", "use it with --to chrome")
    if book is None and (book_key is not None or fabric_id is not None):
        raise UserError("--book-key and --fabric-id are of a book", "name it with --book")
    if book is not None and (job is not None or to not in ("plan", *_TABLES)):
        raise UserError("a book has winners, and no jobs", f"export it to plan, {', '.join(_TABLES)}")
    out = output_file(out)
    exporting.check_suffix(out, to)
    is_replaced = out.is_file()
    remarks = write(store_path(store), out, job) if book is None else _write_book(to, out, book, book_key, fabric_id)
    if is_replaced:
        remarks.append("It replaces the file that was there.")
    if as_json:
        import json

        print(json.dumps({"file": str(out), "format": to, "remarks": remarks}))
    else:
        print("\n".join(remarks))


def _write_book(to: str, out: Path, book: str, book_key: str | None, fabric_id: str | None) -> list[str]:
    from ...fleet import READING, check_installed

    check_installed("--book", READING)
    from ....store.plan_file import PlanFile, write_plan
    from ....store.records import Plan
    from ...fleet import reading
    from ...fleet.signing import Verifier
    from ...offline import tuner_tables

    found = reading.read_book(book, None if book_key is None else Verifier.of(book_key))
    fabric_id, rows = reading.plan_rows(found, book, fabric_id)
    if to != "plan":
        return tuner_tables.write_table(to, rows, out)
    write_plan(out, PlanFile(Plan(1, rows), fabric_id=fabric_id))
    return [f"{counted(len(rows), 'row')} written to {out}."]
