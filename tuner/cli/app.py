"""All subcommands in one typer application; one module per command."""

from __future__ import annotations

import copy
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Annotated, Any, Final

import typer

from .grouped import Grouped
from .live.daemon import daemon
from .live.doctor import doctor
from .live.explain import explain
from .live.jobs import jobs
from .live.launch import launch
from .live.status import status
from .live.store import store
from .offline.advise import advise
from .offline.demo import demo
from .offline.hardware import hardware
from .offline.predict import predict
from .offline.replay import replay
from .offline.report import report
from .offline.sweep import sweep

METAVARS: Final = {"path": "PATH", "Path": "PATH", "int": "N", "float": "NUMBER"}
"""Placeholder of a value in help, by its type; for other types, the last word of the option's name."""
_WIDTH: Final = 80


app = typer.Typer(
    name="zerotune",
    cls=Grouped,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TRAIN, LOOK, MEASURE, KEEP = "Train", "Look", "Measure and predict", "Keep"
app.command(rich_help_panel=TRAIN)(launch)
app.add_typer(daemon, name="daemon", rich_help_panel=TRAIN)
for _panel, _commands in {
    TRAIN: (doctor, demo),
    LOOK: (status, jobs, explain, report),
    MEASURE: (sweep, replay, predict, advise),
}.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)
app.add_typer(hardware, name="hardware", rich_help_panel=MEASURE)
app.add_typer(store, name="store", rich_help_panel=KEEP)


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"zerotune {importlib.metadata.version('zerotune')}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Online autotuning of NCCL collectives for ZeRO and FSDP training.

    Example, without a GPU: zerotune demo

    Example: zerotune launch -- torchrun --nproc-per-node 8 train.py
    """
    if context.invoked_subcommand is None:
        from .greeting import print_greeting

        print_greeting()


@cache
def command_line(asked: str | None = None) -> Any:
    """The application with all commands; only the `asked` one gets its options. "": none does, as for a list of all.

    Without `asked`, all commands get theirs.
    """
    found = typer.main.get_command(app if asked is None else _with_options_of(asked))
    _name_values([found])
    return found


def help_of(names: Sequence[str]) -> str | None:
    """The help of the command with these names, or None if there is no such command.

    typer would parse the words first, for which it loads pydantic: half of the time of a `--help`.
    """
    command, context = command_line(names[0] if names else ""), None
    for name in ("zerotune", *names):
        command = command if context is None else getattr(command, "commands", {}).get(name)
        if command is None:
            return None
        context = command.context_class(command, info_name=name, parent=context, **command.context_settings)
    return str(command.get_help(context))


def _with_options_of(asked: str) -> typer.Typer:
    """The application; commands except `asked` have only a name and a description, as typer's options are slow."""
    light = copy.copy(app)
    light.registered_commands = [
        one if _name(one) == asked else _described(one) for one in app.registered_commands
    ]
    light.registered_groups = [one if one.name == asked else _without_commands(one) for one in app.registered_groups]
    return light


def _name(command: Any) -> str:
    return str(command.name or command.callback.__name__)


def _described(command: Any) -> Any:
    def nothing() -> None: ...

    nothing.__doc__ = command.callback.__doc__
    described = copy.copy(command)
    described.name, described.callback = _name(command), nothing
    return described


def _without_commands(group: Any) -> Any:
    described, inner = copy.copy(group), copy.copy(group.typer_instance)
    inner.registered_commands = []
    described.typer_instance = inner
    return described


def _name_values(commands: Iterable[Any]) -> None:
    """Make help name values by a word, not by a Python type, and print examples as they are typed."""
    for command in commands:
        command.format_help_text = partial(_write_help_text, command)
        for one in command.params:
            kind = one.bare_type().removeprefix("list[").rstrip("]")
            if one.param_type_name == "argument":
                one.metavar = one.metavar or one.name.upper().rstrip("_")
                one.display_type = lambda ctx: ""
            elif one.metavar is None and not one.is_flag:
                choices = [str(getattr(value, "value", value)) for value in one.type_descriptor.choices or ()]
                one.metavar = "|".join(choices) or METAVARS.get(kind) or one.opts[0].rpartition("-")[2].upper()
        _name_values(getattr(command, "commands", {}).values())


def _write_help_text(command: Any, ctx: Any, formatter: Any) -> None:
    """Write a command's description; a long example continues after a backslash."""
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(re.sub(r"\n\n([^\n]*:) (zerotune [^\n]*)", _example, inspect.cleandoc(command.help or "")))


def _example(found: re.Match[str]) -> str:
    words, command = found.groups()
    if len(f"  {words} {command}") > _WIDTH:
        lines = textwrap.wrap(command, _WIDTH - 6, break_long_words=False, break_on_hyphens=False)
        return f"\n\n\b\n{words}\n  " + " \\\n    ".join(lines)
    return f"\n\n\b\n{words} {command}"
