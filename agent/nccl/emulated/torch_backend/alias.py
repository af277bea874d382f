"""`nccl` as the emulated backend's name, for scripts that ask `get_backend() == "nccl"`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

BACKEND: Final = "emulated_nccl"
"""The backend's registered name."""


def alias_as_nccl() -> None:
    """From now on `get_backend` returns "nccl", and groups with backend "nccl" are emulated.

    Torch's own modules still get the real name: for NCCL they would use CUDA.
    """
    get_backend = c10d.get_backend
    if hasattr(get_backend, "zerotune_alias"):
        return

    @functools.wraps(get_backend)
    def get_alias(group: dist.ProcessGroup | None = None) -> str:
        name = get_backend(group)
        asked_by_torch = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch"
        return name if asked_by_torch or name != BACKEND else dist.Backend.NCCL

    # A mark on the function, so that a second call does not wrap it again.
    get_alias.zerotune_alias = True  # type: ignore[attr-defined]  # functions declare no attributes
    _replace(get_backend, get_alias)
    for maker, position in ((c10d.init_process_group, 0), (c10d.new_group, 2)):
        _replace(maker, _of_alias(maker, position))


def _of_alias(maker: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(maker)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        positional = list(args)
        if len(positional) > position and positional[position] == dist.Backend.NCCL:
            positional[position] = BACKEND
        if kwargs.get("backend") == dist.Backend.NCCL:
            kwargs["backend"] = BACKEND
        return maker(*positional, **kwargs)

    return make_group


def _replace(original: Any, replacement: Any) -> None:
    """Replace the function in every module that has it by its name."""
    name = original.__name__
    for module in tuple(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)
