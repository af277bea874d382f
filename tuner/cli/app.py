"""All subcommands in one typer application; one module per command."""

from __future__ import annotations

from typing import Annotated

import typer

from tuner.cli.daemon import daemon
from tuner.cli.demo import demo
from tuner.cli.explain import explain
from tuner.cli.export import export
from tuner.cli.fabrics import fabrics
from tuner.cli.import_ import import_
from tuner.cli.keys import keys
from tuner.cli.launch import launch
from tuner.cli.memory import memory
from tuner.cli.metrics import metrics
from tuner.cli.models import models
from tuner.cli.plot import plot
from tuner.cli.replay import replay
from tuner.cli.report import report
from tuner.cli.stage import stage
from tuner.cli.status import status
from tuner.cli.sweep import sweep

app = typer.Typer(
    name="zerotune",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# The order of `zerotune --help`.
for _command in (
    daemon,
    launch,
    status,
    explain,
    replay,
    sweep,
    import_,
    export,
    memory,
    report,
    plot,
    metrics,
    fabrics,
    keys,
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
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Online autotuning of NCCL collectives for ZeRO and FSDP training.

    Example, without a GPU: zerotune demo

    Example: zerotune launch --start-daemon -- torchrun --nproc-per-node 8 train.py
    """


app.add_typer(models, name="models")
app.add_typer(stage, name="stage")
