"""Handles gradients during backward, and once at its end.

autograd calls this module after producing each parameter's gradient. A callback, queued at the first sign of a backward
pass, also calls it after the whole pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..errors import LifecycleError
from .gradients import FlatGradients, PendingReductions
from .unit import Unit


class Parameters(Protocol):
    """Protocol of `PartitionedParameters` and `ReplicatedParameters`, which hold whole parameters."""

    def begin_backward(self) -> None:
        """A pass begins."""

    def on_unit_done(self, unit: Unit) -> None:
        """Every trainable parameter of the unit has its gradient."""

    def finish_units(self) -> None:
        """The pass is over: gather and free the units that this rank did not use."""

    def end_backward(self) -> None:
        """Gradients are sent; nothing needs whole parameters any more."""


class BackwardPass:
    """Moves gradients into buckets and sends the buckets.

    All units, in the model's order, share `pending`, so that the number of buckets under way is bounded for the model.
    """

    def __init__(self, units: Sequence[Unit], pending: PendingReductions, parameters: Parameters) -> None:
        self.sync = True
        self.active = False
        self.n_steps = 0
        self._units = units
        self._pending = pending
        self._parameters = parameters
        self._missing = {id(unit): 0 for unit in units}
        for unit in units:
            for gradients in unit.gradients:
                for slot, parameter in enumerate(gradients.flat.parameters):
                    receive = self._receiver(unit, gradients, slot)
                    # torch declares no types for this method of Tensor.
                    parameter.register_post_accumulate_grad_hook(receive)  # type: ignore[no-untyped-call]
        self._reset()

    def _reset(self) -> None:
        for unit in self._units:
            self._missing[id(unit)] = sum(len(g.flat.parameters) for g in unit.gradients)

    def is_done(self, unit: Unit) -> bool:
        """Whether every trainable parameter of the unit has its gradient in this pass."""
        return self._missing[id(unit)] <= 0

    def begin(self) -> None:
        """Begins a backward pass at its first sign; later calls do nothing."""
        if self.active:
            return
        self.active = True
        self._pending.complete_all()  # so that the last pass's buckets may be reused
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._parameters.begin_backward()

    def is_under_way(self) -> bool:
        """Whether a pass runs now; a pass that ended by an exception does not count."""
        if self.active and torch._C._current_graph_task_id() == -1:
            self.active = False
            self._reset()
        return self.active

    def check_age(self, n_steps: int) -> None:
        """Raises `LifecycleError` for the backward of a forward that ran before the last optimizer step.

        `n_steps` is the number of steps at that forward.
        """
        if n_steps != self.n_steps:
            raise LifecycleError(
                "this backward belongs to a forward that ran before the last optimizer step, whose parameters "
                "are gone; call backward before step(), or the model again"
            )

    def _receiver(self, unit: Unit, gradients: FlatGradients, slot: int) -> Callable[[Tensor], None]:
        key = id(unit)

        def receive(parameter: Tensor) -> None:
            self.begin()
            gradient = parameter.grad
            assert gradient is not None
            gradients.add(slot, gradient, final=self.sync)
            parameter.grad = None
            if self.sync:
                unit.schedule.advance()
            self._missing[key] -= 1
            if self._missing[key] == 0:
                self._parameters.on_unit_done(unit)

        return receive

    def _end(self) -> None:
        try:
            self._parameters.finish_units()
            if self.sync:
                for unit in reversed(self._units):
                    unit.schedule.flush()
        finally:
            self.active = False
            self._reset()
            self._parameters.end_backward()
