"""Commands and options by their names of release 0.1: they work for one release more, and say the new name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

Words = list[str]


def _plot(words: Words) -> Words:
    """`plot NAME [OUT]` names the picture first, `report [OUT] --plot NAME` the file."""
    return ["report", *words[1:], "--plot", words[0]] if words else ["report", "--plot"]


def _nccl(words: Words) -> Words:
    return ["hardware"] if words == ["list"] else ["predict", *words]


COMMANDS: Final[dict[str, tuple[str, ...] | Callable[[Words], Words]]] = {
    "top": ("status", "--watch"),
    "dashboard": ("status", "--web"),
    "plot": _plot,
    "metrics": ("daemon", "metrics"),
    "keys": ("daemon", "keys"),
    "import": ("store", "import"),
    "export": ("store", "export"),
    "book": ("store", "book"),
    "models": ("store", "models"),
    "memory": ("advise", "--memory"),
    "nccl": _nccl,
    "table": ("predict",),
    "fabrics": ("hardware",),
    "stage": ("explain",),
}
"""What a first word became."""
OPTIONS: Final = {
    "launch": {"--start-daemon": "--daemon", "--no-start-daemon": "--no-daemon"},
    "sweep": {"--n-ranks": "--ranks", "--budget": "--samples-share", "--precision": "--half-width"},
    "store": {"--n-ranks": "--ranks", "--n-nodes": "--nodes", "--overwrite": "--force"},
    "advise": {"--gpus": "--ranks-per-node"},
}
"""What options became, by command."""


def renamed(words: Words) -> tuple[Words, str]:
    """A command line by today's names, and what to tell of it: empty if it had them already.

    What follows `--` is the training command's own.
    """
    end = words.index("--") if "--" in words else len(words)
    ours, rest = words[:end], words[end:]
    became = COMMANDS.get(ours[0]) if ours else None
    told = ""
    if became is not None:
        after = became(ours[1:]) if callable(became) else [*became, *ours[1:]]
        told, ours = f"`zerotune {ours[0]}` is `zerotune {' '.join(after)}` now", after
    options = OPTIONS.get(ours[0], {}) if ours else {}
    for at, word in enumerate(ours):
        name, equals, value = word.partition("=")
        if name in options:
            ours[at] = options[name] + equals + value
            told = told or f"{name} is {options[name]} now"
    return [*ours, *rest], told
