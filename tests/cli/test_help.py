"""The help of every command: as wide as a terminal, with words for values, and all that an option may be."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

from zerotune.tuner.cli import completion
from zerotune.tuner.cli.app import command_line

OF_THIS_MACHINE = (
    completion.fabrics,
    completion.described,
    completion.machines,
    completion.user_fabrics,
    completion.jobs,
    completion.fabric_ids,
)
"""Completions whose values are no fixed set."""


def _all(path: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from _all((*path, name), below)


COMMANDS = list(_all(("zerotune",), command_line()))
every_command = pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])


def _help(path: tuple[str, ...], command: Any) -> str:
    context = None
    for name in path:
        found = command_line() if context is None else context.command.commands[name]
        context = found.context_class(found, info_name=name, parent=context, terminal_width=80, max_content_width=80)
    return str(command.get_help(context))


@every_command
def test_help_fits_80_columns_and_names_values_by_words(path: tuple[str, ...], command: Any) -> None:
    text = _help(path, command)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert re.findall(r"<\w+>|\bTEXT\b|\b(?:INTEGER|FLOAT|BOOLEAN)\b|\bNone\b|\bPath\(|\[<|Optional", text) == []


@every_command
def test_no_option_is_hidden_and_each_says_what_it_is(path: tuple[str, ...], command: Any) -> None:
    assert [one.opts for one in command.params if getattr(one, "hidden", False) or not one.help] == []


def test_help_shows_all_choices() -> None:
    n_seen, untold = 0, []
    for path, command in COMMANDS:
        if command.callback is None:
            continue
        parameters = inspect.signature(inspect.unwrap(command.callback), eval_str=True).parameters
        for option in command.params:
            annotation = getattr(parameters.get(option.name), "annotation", None)
            (info,) = getattr(annotation, "__metadata__", (None,))
            offered = getattr(info, "autocompletion", None)
            if offered is None or offered in OF_THIS_MACHINE:
                continue
            n_seen += 1
            told = re.findall(r"[\w-]+", f"{option.metavar} {option.help}")
            untold += [(*path, option.opts, value) for value in offered(None, "") if value not in told]
    assert n_seen > 10
    assert untold == []


def test_a_long_example_goes_on_behind_a_backslash() -> None:
    path, command = next((path, command) for path, command in COMMANDS if path[-1] == "launch")
    assert "--nproc-per-node 2 \\\n      train.py\n" in _help(path, command)
