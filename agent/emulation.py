"""Runs an unmodified script's collectives on the emulated NCCL: its process groups are made there.

Only for a machine without GPUs: the real NCCL needs nothing of this.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

BACKEND = "emulated_nccl"
REPLACED = frozenset({"nccl", "gloo", "cpu:gloo,cuda:nccl", "cpu:gloo", "cuda:nccl", "undefined"})


def install() -> None:
    """From now on `init_process_group` and `new_group` make emulated groups in place of real ones."""
    for name in ("init_process_group", "new_group"):
        original = getattr(c10d, name)
        if getattr(original, "zerotune_emulated", False):
            continue
        replacement = _on_emulated(original, asks_default=name == "init_process_group")
        for module in (c10d, dist):
            setattr(module, name, replacement)


def _on_emulated(original: Any, *, asks_default: bool) -> Any:
    position = 0 if asks_default else 2  # of `backend` among the positional arguments

    @functools.wraps(original)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        import agent.nccl.emulated  # noqa: F401 - registers the backend

        positional = list(args)
        if len(positional) > position:
            positional[position] = _backend(positional[position], asks_default)
        else:
            kwargs["backend"] = _backend(kwargs.get("backend"), asks_default)
        return original(*positional, **kwargs)

    # A mark on the function, so that a second install does not wrap it again.
    make_group.zerotune_emulated = True  # type: ignore[attr-defined]
    return make_group


def _backend(asked: str | None, asks_default: bool) -> str | None:
    if asked is None:
        # A new group without a backend takes the default group's, which is emulated already.
        return BACKEND if asks_default else None
    return BACKEND if str(asked).lower() in REPLACED else asked
