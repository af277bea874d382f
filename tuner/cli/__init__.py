"""The `zerotune` command: each subcommand parses, calls one function of its part, and renders.

One module per command; everything heavy is imported inside the commands, so that `zerotune --help` answers at once.
Exit codes: 0 done, 1 it failed, 2 a mistake of the user's (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
from typing import Annotated, Any

import typer

from store.errors import UserError, ZerotuneError
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


def main() -> None:
    """Entry point of the console script: every failure is one line on stderr and an exit code, never a traceback."""
    # Where the home cannot be written, matplotlib tells at length that it keeps its fonts elsewhere.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        code = app(prog_name="zerotune", standalone_mode=False)
    except UserError as error:
        code = _failed(str(error), 2)
    except ZerotuneError as error:
        code = _failed(str(error), 1)
    except sqlite3.DatabaseError as error:
        reason = " ".join(str(error).split())
        remedy = "start `zerotune daemon` anew: it keeps the damaged file under another name and begins a new one"
        code = _failed(f"the store is damaged ({reason}); {remedy}", 2)
    except _UsageError as error:
        code = _explain_usage(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read has left: nothing to say
        code = 0
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        code = _failed(f"cannot use{where}: {error.strerror or error}; check the path and its permissions", 2)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


_UsageError: Any = typer.BadParameter.__base__
"""click's, of the copy of click that this typer uses."""


def _failed(words: str, code: int) -> int:
    print(f"zerotune: {words}", file=sys.stderr)
    return code


def _explain_usage(error: Any) -> int:
    """Wrong options on one line; a command without any gets its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    path = error.ctx.command_path if error.ctx is not None else "zerotune"
    problem = " ".join(error.format_message().split()).rstrip(".") + _value_of(error)
    return _failed(f"{problem}; see `{path} --help`", 2)


def _value_of(error: Any) -> str:
    """The value that was refused, for typers whose message leaves it out (they check by pydantic)."""
    errors = getattr(error.__cause__, "errors", None)
    return f", not {errors()[0]['input']!r}" if callable(errors) else ""
