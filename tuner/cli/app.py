"""All subcommands in one typer application; one module per command."""

from __future__ import annotations

from typing import Annotated

import typer

from .live.daemon import daemon
from .live.dashboard import dashboard
from .live.doctor import doctor
from .live.explain import explain
from .live.fabrics import fabrics
from .live.jobs import jobs
from .live.keys import keys
from .live.launch import launch
from .live.metrics import metrics
from .live.models import models
from .live.status import status
from .live.store import store
from .live.top import top
from .offline.advise import advise
from .offline.book import book
from .offline.demo import demo
from .offline.export import export
from .offline.import_ import import_
from .offline.memory import memory
from .offline.nccl import nccl
from .offline.plot import plot
from .offline.replay import replay
from .offline.report import report
from .offline.stage import stage
from .offline.sweep import sweep
from .offline.table import table

app = typer.Typer(
    name="zerotune",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# The order of `zerotune --help`.
for _command in (
    daemon,
    launch,
    status,
    top,
    dashboard,
    jobs,
    explain,
    table,
    replay,
    sweep,
    import_,
    export,
    memory,
    advise,
    report,
    plot,
    metrics,
    nccl,
    keys,
    doctor,
    demo,
):
    app.command(name=_command.__name__.rstrip("_"))(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"zerotune {importlib.metadata.version('zerotune')}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Online autotuning of NCCL collectives for ZeRO and FSDP training.

    Example, without a GPU: zerotune demo

    Example: zerotune launch --start-daemon -- torchrun --nproc-per-node 8 train.py
    """
    if context.invoked_subcommand is None:
        from .greeting import greet

        greet()


app.add_typer(book, name="book")
app.add_typer(fabrics, name="fabrics")
app.add_typer(models, name="models")
app.add_typer(stage, name="stage")
app.add_typer(store, name="store")
