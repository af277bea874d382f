"""What happens to gradients while backward runs, and once when it ends.

autograd calls us after it has produced each parameter's gradient, and, by a callback queued at the first sign
of a backward pass, after the whole of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zero_runtime.gradients import FlatGradients, Flights
from zero_runtime.unit import Unit


class BackwardPass:
    """Moves gradients into buckets and sends the buckets.

    Args:
        units: in the model's order.
        flights: shared by all units, so that the number of buckets under way is bounded for the model.
        on_unit_done: called when every trainable parameter of a unit has its gradient.
        on_end: called when the pass is over and all buckets are sent.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        flights: Flights,
        on_unit_done: Callable[[Unit], None],
        on_end: Callable[[], None],
    ) -> None:
        self.sync = True
        self.active = False
        self._units = units
        self._flights = flights
        self._on_unit_done = on_unit_done
        self._on_end = on_end
        self._missing = {id(unit): 0 for unit in units}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._receiver(unit, gradients, slot)
            )
            for unit in units
            for gradients in unit.gradients
            for slot, parameter in enumerate(gradients.flat.parameters)
        ]
        self._reset()

    def _reset(self) -> None:
        for unit in self._units:
            self._missing[id(unit)] = sum(len(g.flat.parameters) for g in unit.gradients)

    def is_done(self, unit: Unit) -> bool:
        """Whether every trainable parameter of the unit has delivered in this pass."""
        return self._missing[id(unit)] <= 0

    def begin(self) -> None:
        """Called at every sign of a backward pass; the first one counts."""
        if self.active:
            return
        self.active = True
        self._flights.land_all()  # last pass's buckets may be written again
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _receiver(self, unit: Unit, gradients: FlatGradients, slot: int) -> Callable[[Tensor], None]:
        key = id(unit)

        def receive(parameter: Tensor) -> None:
            self.begin()
            gradient = parameter.grad
            assert gradient is not None
            if self.sync:
                gradients.add(slot, gradient, final=True)
            else:
                if not gradients.has_local:
                    gradients.allocate_local()
                gradients.add(slot, gradient, final=False)
            parameter.grad = None
            if self.sync:
                unit.schedule.advance()
            self._missing[key] -= 1
            if self._missing[key] == 0:
                self._on_unit_done(unit)

        return receive

    def _end(self) -> None:
        if self.sync:
            for unit in reversed(self._units):
                unit.schedule.flush()
                for gradients in unit.gradients:
                    gradients.release_local()
        self.active = False
        self._reset()
        self._on_end()

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
