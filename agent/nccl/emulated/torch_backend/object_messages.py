"""Collectives on Python objects in a group with two backends ("cpu:gloo,cuda:nccl"): torch sends objects by gloo.

All tensors of the emulation are on the CPU, so a tensor does not determine the backend. Torch's collectives on objects
are recognised by the calling function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

from torch.distributed import distributed_c10d as c10d

_ENDINGS: Final = ("_object", "_object_list")
"""Endings of the names of torch's collectives on objects."""
_DEPTH: Final = 8
"""Callers to check: torch wraps its functions in several layers of logging."""


def by_gloo(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a method of an emulated group: objects go to the group's gloo, if it was made with two backends."""

    @functools.wraps(method)
    def choose(self: Any, *arguments: Any) -> Any:
        if self.sends_objects_by_gloo and _carries_objects():
            return getattr(self._gloo, method.__name__)(*arguments)
        return method(self, *arguments)

    return choose


def _carries_objects() -> bool:
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame.f_globals is vars(c10d) and frame.f_code.co_name.endswith(_ENDINGS):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
