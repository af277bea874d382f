"""Earlier names of commands and options: they work for one more release, with a message about the new name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

Words = list[str]


def _plot(words: Words) -> Words:
    """`plot NAME [OUT]` became `report [OUT] --plot NAME`."""
    is_named = bool(words) and not words[0].startswith("-")
    return ["report", *words[1:], "--plot", words[0]] if is_named else ["report", *words]


def _nccl(words: Words) -> Words:
    """`nccl --min-bytes A --max-bytes B` became `predict --sizes A:B`."""
    if words == ["list"]:
        return ["hardware"]
    rest, limits = ["predict"], {"--min-bytes": "1K", "--max-bytes": "1G"}
    before, given = dict(limits), iter(words)
    for word in given:
        name, equals, value = word.partition("=")
        if name in limits:
            limits[name] = value if equals else next(given, "")
        else:
            rest.append(word)
    return rest if limits == before else [*rest, "--sizes", ":".join(limits.values())]


def _memory(words: Words) -> Words:
    """`memory --model 7B` became `advise 7B --memory`."""
    return ["advise", "--memory", *(word.removeprefix("--model=") for word in words if word != "--model")]


def _stage(words: Words) -> Words:
    return ["explain", "--trace", *words[1:]] if words[:1] == ["test"] else ["explain", *words]


COMMANDS: Final[dict[str, tuple[str, ...] | Callable[[Words], Words]]] = {
    "top": ("status", "--watch"),
    "dashboard": ("status", "--web"),
    "plot": _plot,
    "metrics": ("daemon", "metrics"),
    "keys": ("daemon", "keys"),
    "import": ("store", "import"),
    "export": ("store", "export"),
    "book": ("store", "book"),
    "models": lambda words: ["store", "models", *(word for word in words if word != "list")],
    "memory": _memory,
    "nccl": _nccl,
    "table": ("predict",),
    "fabrics": ("hardware",),
    "stage": _stage,
    # These were never names of commands, but people try them.
    "stop": ("daemon", "stop"),
    "version": ("--version",),
    "watch": ("status", "--watch"),
    "web": ("status", "--web"),
}
"""New words by an earlier first word."""
OPTIONS: Final = {
    "launch": {"--start-daemon": "--daemon", "--no-start-daemon": "--no-daemon"},
    "sweep": {"--n-ranks": "--ranks", "--budget": "--samples-share", "--precision": "--half-width"},
    "store": {"--n-ranks": "--ranks", "--n-nodes": "--nodes", "--overwrite": "--force"},
    "advise": {"--gpus": "--ranks-per-node", "--machine": "--fabric"},
    "predict": {"--nccl": "--library"},
    "hardware": {"--nccl": "--library"},
}
"""New options by earlier ones, by command."""


def renamed(words: Words) -> tuple[Words, str]:
    """A command line with today's names, and a message about the new name; empty if it had them already.

    Words after `--` belong to the training command.
    """
    end = words.index("--") if "--" in words else len(words)
    own, rest = words[:end], words[end:]
    became = COMMANDS.get(own[0]) if own else None
    message = ""
    if became is not None:
        after = became(own[1:]) if callable(became) else [*became, *own[1:]]
        message, own = f"`zerotune {own[0]}` is `zerotune {' '.join(after)}` now", after
    options = OPTIONS.get(own[0], {}) if own else {}
    for at, word in enumerate(own):
        name, equals, value = word.partition("=")
        if name in options:
            own[at] = options[name] + equals + value
            message = message or f"{name} is {options[name]} now"
    return [*own, *rest], message
