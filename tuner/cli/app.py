"""All subcommands in one typer application; one module per command."""

from __future__ import annotations

from typing import Annotated

import typer

from zerotune.tuner.cli.live.daemon import daemon
from zerotune.tuner.cli.live.dashboard import dashboard
from zerotune.tuner.cli.live.doctor import doctor
from zerotune.tuner.cli.live.explain import explain
from zerotune.tuner.cli.live.fabrics import fabrics
from zerotune.tuner.cli.live.jobs import jobs
from zerotune.tuner.cli.live.keys import keys
from zerotune.tuner.cli.live.launch import launch
from zerotune.tuner.cli.live.metrics import metrics
from zerotune.tuner.cli.live.models import models
from zerotune.tuner.cli.live.status import status
from zerotune.tuner.cli.live.store import store
from zerotune.tuner.cli.live.top import top
from zerotune.tuner.cli.offline.advise import advise
from zerotune.tuner.cli.offline.book import book
from zerotune.tuner.cli.offline.demo import demo
from zerotune.tuner.cli.offline.export import export
from zerotune.tuner.cli.offline.import_ import import_
from zerotune.tuner.cli.offline.memory import memory
from zerotune.tuner.cli.offline.nccl import nccl
from zerotune.tuner.cli.offline.plot import plot
from zerotune.tuner.cli.offline.replay import replay
from zerotune.tuner.cli.offline.report import report
from zerotune.tuner.cli.offline.stage import stage
from zerotune.tuner.cli.offline.sweep import sweep
from zerotune.tuner.cli.offline.table import table

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
        from zerotune.tuner.cli.greeting import greet

        greet()


app.add_typer(book, name="book")
app.add_typer(fabrics, name="fabrics")
app.add_typer(models, name="models")
app.add_typer(stage, name="stage")
app.add_typer(store, name="store")
