"""Step boundaries and regions of the step, from torch's own hooks: O(1) Python per step.

A *region* says where in the step the program is: forward, backward (inside
`torch.autograd.backward`), after_backward (until the optimizer's step: DeepSpeed's ZeRO-1 reduces its
gradients here; with gradient accumulation the next forward is here, too) or step (inside an optimizer's
`step`, unless a closure computes the gradients there). A *boundary* is the end of the first optimizer step
after a backward pass, the same program point on all ranks; several optimizers that step after one backward
make one boundary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Region(IntEnum):
    """Values for the plugin's `phase_or_region` (zerotune_plugin.h, `zt_region_code`)."""

    forward = 16
    backward = 17
    step = 18
    after_backward = 19


class StepHooks:
    """Calls `on_region` when the region changes and `on_boundary` at each step boundary.

    Both run on the training thread and must not raise.
    """

    def __init__(self, on_region: Callable[[int], None], on_boundary: Callable[[], None]) -> None:
        self._on_region = on_region
        self._on_boundary = on_boundary
        self._backward_depth = 0
        self._backward_ever = False
        self._backward_since_boundary = False
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Register with torch; `remove` takes everything back."""
        for handle in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self._undo.append(handle.remove)
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            self._enter_backward()
            try:
                original(*args, **kwargs)
            finally:
                self._leave_backward()

        torch.autograd.backward = backward

        def restore() -> None:
            if torch.autograd.backward is backward:
                torch.autograd.backward = original

        self._undo.append(restore)

    def remove(self) -> None:
        """Leave torch as it was found."""
        while self._undo:
            self._undo.pop()()

    def step_ended(self) -> None:
        """The script says that a step ends here; ignored where the end of this step was seen already."""
        self._after_step()

    def _enter_backward(self) -> None:
        # Reentrant activation checkpointing calls backward inside backward.
        if self._backward_depth == 0:
            self._on_region(Region.backward)
        self._backward_depth += 1

    def _leave_backward(self) -> None:
        self._backward_depth -= 1
        if self._backward_depth == 0:
            self._backward_ever = self._backward_since_boundary = True
            self._on_region(Region.after_backward)

    def _before_step(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # An optimizer may step inside backward (optimizer-in-backward): the region stays backward. With a closure
        # (Lightning's trainer always has one) forward and backward run inside the step, and it stays what it was.
        has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        if self._backward_depth == 0 and not has_closure:
            self._on_region(Region.step)

    def _after_step(self, *_: Any) -> None:
        if self._backward_depth:
            return
        if self._backward_since_boundary or not self._backward_ever:
            self._backward_since_boundary = False
            self._on_boundary()
        self._on_region(Region.forward)
