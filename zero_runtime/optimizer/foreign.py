"""Refuses an optimizer over a sharded model's own parameters: the engine has their gradients, so it trains nothing.

torch calls this check before every optimizer's step; each optimizer is checked once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import LifecycleError

_MARK = "_zero_runtime_sharded"
_right: WeakSet[torch.optim.Optimizer] = WeakSet()
_hooked: list[Any] = []


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Marks these parameters as sharded."""
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_refuse))
    for parameter in parameters:
        setattr(parameter, _MARK, True)


def is_marked(parameter: nn.Parameter) -> bool:
    """Whether an engine has sharded the parameter."""
    return _MARK in vars(parameter)


def _refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or optimizer in _right:  # compiled steps are not checked
        return
    if any(is_marked(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        name = type(optimizer).__name__
        raise LifecycleError(
            f"{name} was made over parameters of a sharded model and would train nothing; make it by "
            f"engine.optimizer({name}, ...)"
        )
    _right.add(optimizer)
