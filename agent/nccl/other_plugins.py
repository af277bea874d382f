"""Places for plugins: NCCL has one for a tuner and one for a profiler.

Ours goes there, and what was named before is written down for it: our library opens that and asks it first. What NCCL
would have found by itself it finds by NCCL's rules (`plugin/next/library.c`).
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
"""Of a file that says what NCCL is set to."""
_OURS: Final = (Path(PLUGIN.file).name, "zerotune")


@dataclass(frozen=True)
class Place:
    """One of NCCL's two, by its variable."""

    variable: str
    next_variable: str
    """What our library reads: the other's path or name, empty where NCCL searches by itself."""


TUNER: Final = Place("NCCL_TUNER_PLUGIN", "ZEROTUNE_NEXT_TUNER")
PROFILER: Final = Place("NCCL_PROFILER_PLUGIN", "ZEROTUNE_NEXT_PROFILER")


def named(place: Place, environment: Mapping[str, str]) -> str:
    """The other plugin that the user has named for `place`: a path, a name, STATIC_PLUGIN or none; empty: nothing."""
    value = environment.get(place.variable)
    if value is None:
        value = _configured(environment).get(place.variable, "")
    return value if Path(value).name not in _OURS else environment.get(place.next_variable, "")


def take_places(environment: MutableMapping[str, str], ours: str, *, searches: bool) -> None:
    """Put our plugin where NCCL looks for a tuner and a profiler, and write down whose places those were.

    Args:
        ours: path or name of our library.
        searches: what NCCL would find without being told a name is asked, too.
    """
    for place in (TUNER, PROFILER):
        other = named(place, environment)
        if other or searches:
            environment[place.next_variable] = other
        environment[place.variable] = ours


def give_back(environment: MutableMapping[str, str]) -> None:
    """Where ours cannot be loaded after all, NCCL is to load what it would have loaded."""
    for place in (TUNER, PROFILER):
        if Path(environment.get(place.variable, "")).name not in _OURS:
            continue
        other = environment.pop(place.next_variable, "")
        del environment[place.variable]
        if other:
            environment[place.variable] = other


def others(environment: Mapping[str, str]) -> Iterator[tuple[Place, str]]:
    """Places for which another plugin is named, and its name."""
    for place in (TUNER, PROFILER):
        if (name := named(place, environment)) and name.lower() != "none":
            yield place, name


def left_out(environment: Mapping[str, str], plugin: Plugin) -> Iterator[str]:
    """Each plugin that is named, and was not to be had or speaks no interface of this NCCL: its variable and value."""
    loaded = {
        TUNER: plugin.tuner_abi() == 0 or plugin.next_tuner(),
        PROFILER: plugin.profiler_abi() == 0 or plugin.next_profiler(),
    }
    for place, name in others(environment):
        if not loaded[place]:
            yield f"{place.variable}={name}"


def _configured(environment: Mapping[str, str]) -> dict[str, str]:
    """What NCCL's files say, which it heeds where the environment says nothing. The user's comes first."""
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
