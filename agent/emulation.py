"""Makes an unmodified script's process groups on the emulated NCCL, on a machine without GPUs."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch.distributed import distributed_c10d as c10d

BACKEND = "emulated_nccl"
REPLACED = frozenset({"nccl", "gloo", "undefined"})


def install() -> None:
    """From now on `init_process_group` and `new_group` make emulated groups in place of real ones."""
    for name in ("init_process_group", "new_group"):
        original = getattr(c10d, name)
        if getattr(original, "zerotune_emulated", False):
            continue
        replacement = _on_emulated(original, asks_default=name == "init_process_group")
        # Other modules (device meshes) have imported the same function under a name of their own.
        for module in tuple(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, replacement)


def uses_nccl(backend_config: str) -> bool:
    """Whether a group's collectives on GPUs run on NCCL.

    `backend_config` is the result of `torch.distributed.get_backend_config`. It names the backend of each device, even
    for a group whose backend is "undefined" (none was named).
    """
    return any(part.rpartition(":")[2] == "nccl" for part in backend_config.split(","))


def _on_emulated(original: Any, *, asks_default: bool) -> Any:
    position = 0 if asks_default else 2  # of `backend` among the positional arguments

    @functools.wraps(original)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        import zerotune.agent.nccl.emulated  # registers the backend

        positional = list(args)
        if len(positional) > position:
            asked = positional[position]
            positional[position] = emulated_backend(asked, asks_default)
        else:
            asked = kwargs.get("backend")
            kwargs["backend"] = emulated_backend(asked, asks_default)
        made = original(*positional, **kwargs)
        if asked is not None and _backends(asked) == {"gloo", "nccl"}:
            group = c10d._get_default_group() if asks_default else made
            if isinstance(group, zerotune.agent.nccl.emulated.EmulatedProcessGroup):
                group.sends_objects_by_gloo = True
        return made

    # A mark on the function, so that a second install does not wrap it again.
    make_group.zerotune_emulated = True  # type: ignore[attr-defined]
    return make_group


def emulated_backend(asked: str | None, asks_default: bool) -> str | None:
    """The backend that a process group gets in place of `asked`; None: the default group's."""
    if asked is None:
        # A new group without a backend takes the default group's, which is emulated already.
        return BACKEND if asks_default else None
    if _backends(asked) == {"gloo"} and not asks_default:
        # Without GPUs scripts fall back to a default group on gloo. A further group on gloo is meant to be gloo's.
        return asked
    return BACKEND if _backends(asked) <= REPLACED else asked


def _backends(asked: str) -> set[str]:
    """Both backends of "cpu:gloo,cuda:nccl"; else the one backend for every device."""
    return {part.rpartition(":")[2].strip() for part in str(asked).lower().split(",")}
