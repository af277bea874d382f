"""Right before this process makes its first process group: until then it may be anybody's.

A data loader's worker, a compiler's and torchrun's own process import torch, too, and never get here.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("zerotune.agent")

_waiting: list[Callable[[], None]] = []
_is_watched = False
_is_here = False


def before_first_group(action: Callable[[], None]) -> None:
    """Call `action` before the first process group is made; at once if that has begun. It may raise nothing."""
    global _is_watched
    if not dist.is_available():
        return
    if _is_here or dist.is_initialized():
        action()
        return
    _waiting.append(action)
    if not _is_watched:
        _is_watched = True
        _watch()


def _watch() -> None:
    from torch.distributed import distributed_c10d as c10d

    original = c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        _group_comes()
        return original(*args, **kwargs)

    # Device meshes and others hold the same function by a name of their own.
    for module in tuple(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("init_process_group") is original:
            module.init_process_group = init_process_group  # type: ignore[attr-defined]


def _group_comes() -> None:
    global _is_here
    _is_here = True
    while _waiting:
        try:
            _waiting.pop(0)()
        except Exception as error:  # training must start whatever is wrong with us
            logger.warning("zerotune: the agent is off, training runs untuned: %s", error)
