"""NCCL's variables for plugins: one names a tuner, one a profiler.

They name zerotune's plugin instead of the user's, whose name is kept in other variables. zerotune's plugin loads the
user's plugin as the *next* plugin of a chain, and asks it first. If the user has named none, it searches for one by
NCCL's own rules (`plugin/next/library.c`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...store.foreign.regular_file import read_file
from .compiled import PLUGIN

if TYPE_CHECKING:
    from .library import Plugin

MAX_CONF_BYTES: Final = 2**20
"""Limit of a file with NCCL's settings."""
_ZEROTUNE_NAMES: Final = (Path(PLUGIN.file).name, "zerotune")


@dataclass(frozen=True)
class PluginKind:
    """NCCL's tuner or profiler."""

    variable: str
    next_variable: str
    """The variable with the next plugin's path or name; empty: search by NCCL's rules."""


TUNER: Final = PluginKind("NCCL_TUNER_PLUGIN", "ZEROTUNE_NEXT_TUNER")
PROFILER: Final = PluginKind("NCCL_PROFILER_PLUGIN", "ZEROTUNE_NEXT_PROFILER")


def user_plugin(kind: PluginKind, environment: Mapping[str, str]) -> str:
    """The plugin that the user has named for `kind`: a path, a name, STATIC_PLUGIN or none; empty: no name."""
    value = environment.get(kind.variable)
    if value is None:
        value = _configured(environment).get(kind.variable, "")
    return value if Path(value).name not in _ZEROTUNE_NAMES else environment.get(kind.next_variable, "")


def set_variables(environment: MutableMapping[str, str], name: str, *, searches: bool) -> None:
    """Name zerotune's plugin, by path or name, as NCCL's tuner and profiler, and keep the names of the user's plugins.

    `searches`: also ask plugins that NCCL would find without a name.
    """
    for kind in (TUNER, PROFILER):
        other = user_plugin(kind, environment)
        if other or searches:
            environment[kind.next_variable] = other
        environment[kind.variable] = name


def restore_variables(environment: MutableMapping[str, str]) -> None:
    """Undo `set_variables`, if zerotune's plugin cannot be loaded."""
    for kind in (TUNER, PROFILER):
        if Path(environment.get(kind.variable, "")).name not in _ZEROTUNE_NAMES:
            continue
        other = environment.pop(kind.next_variable, "")
        del environment[kind.variable]
        if other:
            environment[kind.variable] = other


def user_plugins(environment: Mapping[str, str]) -> Iterator[tuple[PluginKind, str]]:
    """(kind, name) of each plugin that the user has named."""
    for kind in (TUNER, PROFILER):
        if (name := user_plugin(kind, environment)) and name.lower() != "none":
            yield kind, name


def unloaded(environment: Mapping[str, str], plugin: Plugin) -> Iterator[str]:
    """`VARIABLE=name` of each named plugin that could not be loaded, or has no interface that this NCCL supports."""
    loaded = {
        TUNER: plugin.tuner_abi() == 0 or plugin.next_tuner(),
        PROFILER: plugin.profiler_abi() == 0 or plugin.next_profiler(),
    }
    for kind, name in user_plugins(environment):
        if not loaded[kind]:
            yield f"{kind.variable}={name}"


def _configured(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings in NCCL's files, which apply if the environment has none. The user's file comes first."""
    user_file = environment.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    found: dict[str, str] = {}
    for path in (user_file, "/etc/nccl.conf"):
        try:
            lines = read_file(Path(path), MAX_CONF_BYTES).decode(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                found.setdefault(name, value)
    return found
