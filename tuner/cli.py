"""The `zerotune` command: each subcommand parses, calls one function of its part, and renders.

Everything heavy is imported inside the commands, so that `zerotune --help` answers at once.
Exit codes: 0 done, 2 a mistake of the user's (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from store.errors import UserError, ZerotuneError

app = typer.Typer(
    name="zerotune",
    help="Online autotuning of NCCL collectives for ZeRO and FSDP training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Endpoint = Annotated[
    Optional[str],
    typer.Option(help="ZeroMQ endpoint of the daemon; default: ipc:// below the runtime directory.",
                 envvar="ZEROTUNE_ENDPOINT"),
]
StorePath = Annotated[
    Optional[Path],
    typer.Option("--store", help="The store's SQLite file; default: below the XDG data directory.",
                 envvar="ZEROTUNE_STORE"),
]
FabricName = Annotated[
    Optional[str],
    typer.Option("--fabric", help="Name or path of a fabric file: use the emulated NCCL. See `zerotune fabrics`."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def main() -> None:
    """Entry point of the console script."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        print(f"zerotune: {error}", file=sys.stderr)
        sys.exit(2)
    except ZerotuneError as error:
        print(f"zerotune: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _store_path(path: Path | None) -> Path:
    from store.paths import default_store_path

    return path or default_store_path()


def _endpoint(endpoint: str | None) -> str:
    from store.paths import default_endpoint

    return endpoint or default_endpoint()


def _console() -> Any:
    from rich.console import Console

    return Console()


@app.command()
def launch(
    command: Annotated[list[str], typer.Argument(help="The training command, after `--`.")],
    fabric: FabricName = None,
    endpoint: Endpoint = None,
    start_daemon: Annotated[bool, typer.Option(help="Start a daemon for this job if none answers.")] = False,
    store: StorePath = None,
    log_trace: Annotated[
        Optional[Path], typer.Option(help="Log every collective into this folder, for `zerotune replay`.")
    ] = None,
    plan: Annotated[
        Optional[Path], typer.Option(help="Run under this plan file, with no daemon at all.")
    ] = None,
    summary: Annotated[Optional[Path], typer.Option(help="Write step times to this JSON file.")] = None,
    agent: Annotated[bool, typer.Option(help="--no-agent runs the emulated fabric untuned.")] = True,
) -> None:
    """Run an unmodified training command with its collectives tuned.

    Example: zerotune launch -- torchrun --nproc-per-node 8 train.py --epochs 3

    Without a GPU: zerotune launch --fabric pcie_ethernet -- torchrun --nproc-per-node 2 train.py
    """
    from agent import launch as launching
    from tuner.status import fetch_status

    request = launching.LaunchRequest(
        command, fabric, endpoint, agent, trace_dir=log_trace, summary_path=summary, plan_path=plan
    )
    where = launching.endpoint(request)
    answers = False
    if agent and plan is None:
        answers = fetch_status(where, timeout_s=0.5) is not None
        if not answers and start_daemon:
            from tuner.background import start_in_background

            start_in_background(where, _store_path(store))
            answers = True
    problems = launching.check(request, daemon_answers=answers)
    launching.refuse_fatal(problems)
    for problem in problems:
        print(f"zerotune: {problem}", file=sys.stderr)
    for folder in filter(None, (log_trace, summary.parent if summary else None)):
        launching.make_writable(folder)
    sys.stdout.flush()
    os.execvpe(command[0], command, launching.environment(request))


@app.command()
def fabrics(as_json: AsJson = False) -> None:
    """List the fabrics of the emulated NCCL.

    Example: zerotune fabrics
    """
    import json

    from agent.nccl import fabric

    described = {name: fabric.load(name).describe() for name in fabric.names()}
    if as_json:
        print(json.dumps(described, indent=2))
        return
    from rich.table import Table

    table = Table("fabric", "what it is", title="Fabrics of the emulated NCCL (launch --fabric NAME)")
    for name, description in described.items():
        table.add_row(name, str(description.get("summary", "")))
    _console().print(table)
