"""Stage 3: a layer's parameters are whole only around its use.

    forward   gather 0 │ use 0, gather 1 │ free 0, use 1, gather 2 │ …            one gather per layer
    backward  (last is still whole) use n │ free n, use n−1, gather n−2 │ …       one less

The next layer is gathered while this one computes; in backward, the previous one. The order is the one that
ranks agreed on (`order.py`): a layer that this rank skips is still gathered, but not used.
The layer that ends the forward begins the backward, so it stays; the root, whose parameters may be used anywhere,
stays from its forward to the end of backward. With n layers besides the root that makes the 2n − 1 gathers of
ZeRO-3, and one for the root.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .. import phases
from .backward import BackwardPass
from .order import Order
from .order_changes import OrderChanges
from .unit import Unit

Hook = TypeVar("Hook", bound=Callable[..., None])


def between_graphs(hook: Hook) -> Hook:
    """Makes `hook` run between graphs under torch.compile, so that graphs only see whole parameters."""
    outside: Hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]  # torch does not annotate it
    return outside


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors inside `value`, including attributes of objects."""
    waiting: list[Any] = [value]
    seen: set[int] = set()
    while waiting:
        for leaf in tree_leaves(waiting.pop()):
            if isinstance(leaf, Tensor):
                yield leaf
            elif id(leaf) not in seen and not isinstance(leaf, type | ModuleType | nn.Module):
                seen.add(id(leaf))
                slots = [name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ())]
                waiting += getattr(leaf, "__dict__", {}).values()
                waiting += [getattr(leaf, name, None) for name in slots]


def differentiable(value: Any) -> Iterator[Tensor]:
    """The tensors inside `value` through which a gradient will flow."""
    return (found for found in tensors_in(value) if found.requires_grad and not isinstance(found, nn.Parameter))


class PartitionedParameters:
    """Gathers and frees units by hooks on their modules.

    Args:
        units: in the model's order, the root first if it has parameters of its own.
        world: the ranks that agree on an order.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        prefetch: int,
        reshard_after_forward: bool,
        world: dist.ProcessGroup,
    ) -> None:
        self._root = root
        self._units = tuple(units)
        self.prefetch = prefetch
        """Prefetch depth; it may change between steps, equally on all ranks."""
        self._reshard = reshard_after_forward
        self._world = world
        self._changes = OrderChanges(world, units[0].flats[0].device)
        self._order = Order(units, units[0].module is root)
        self._backward_order: list[Unit] = []
        self._position = 0  # in the order of the present pass
        self.backward: BackwardPass
        self._inputs_due: dict[int, int] = {}
        for unit in self._units:
            self._watch(unit)
        root.register_forward_pre_hook(between_graphs(self._begin_forward), prepend=True)  # runs first
        root.register_forward_hook(between_graphs(self._end_forward))

    def _watch(self, unit: Unit) -> None:
        module = unit.module

        @between_graphs
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._before_forward(unit, args, kwargs)

        @between_graphs
        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._after_forward(unit, output)

        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after)

    # forward

    def _begin_forward(self, *_: Any) -> None:
        if self.backward.is_under_way():
            return
        self._order.begin_forward()
        self._position = 0

    def _before_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.backward.is_under_way():  # activation checkpointing computes the layer again
            unit.ensure_whole(phases.BACKWARD_GATHER)
            self._use(unit, args, kwargs)
            return
        order = self._order.forward
        if self._order.see(unit) and unit in order[self._position :]:
            position = order.index(unit, self._position)
            # Skipped units are for other ranks, or for later; prefetched ones are gathered during this wait.
            for near in order[self._position : position + 1 + self.prefetch]:
                near.start_gather(phases.FORWARD_GATHER)
            unit.finish_gather()
            self._position = position + 1
        elif not unit.is_whole:
            unit.ensure_whole(phases.FORWARD_GATHER)
            self._changes.seen_here = True
        self._use(unit, args, kwargs)

    def _use(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if unit.has_frozen and torch.is_grad_enabled():
            self._await_inputs(unit, [*differentiable(args), *differentiable(kwargs)])

    def _await_inputs(self, unit: Unit, inputs: list[Tensor]) -> None:
        """Keeps frozen weights until the layer's inputs have their gradients."""
        self._inputs_due[id(unit)] = self._inputs_due.get(id(unit), 0) + len(inputs)

        def arrived(_: Tensor) -> None:
            if id(unit) in self._inputs_due:
                self._inputs_due[id(unit)] -= 1
                self.on_unit_done(unit)

        for tensor in inputs:
            tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _after_forward(self, unit: Unit, output: Any) -> None:
        if self.backward.active:
            return
        returned = list(tensors_in(output))
        hooked = list(differentiable(returned))
        # Without a tensor that shows when its backward begins, a layer has stored its results elsewhere, or has none.
        is_silent = torch.is_grad_enabled() and not hooked and bool(unit.gradients or self._inputs_due.get(id(unit)))
        for flat in unit.flats:
            if is_silent or any(map(flat.holds, returned)):
                flat.keep()
        if not torch.is_grad_enabled():
            unit.free()
            return
        n_steps = self.backward.n_steps

        def before_backward(_: Tensor) -> None:
            self._before_backward(unit, n_steps)

        for tensor in hooked:
            tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]
        if not self._stays(unit):
            unit.free()

    def _stays(self, unit: Unit) -> bool:
        """Whether the unit stays whole from its forward to its backward."""
        order = self._order
        return not self._reshard or unit.module is self._root or unit is order.last or unit in order.kept

    def _end_forward(self, *_: Any) -> None:
        if self.backward.active:
            return
        for passed in self._order.forward[self._position :]:
            passed.ensure_whole(phases.FORWARD_GATHER)
        self._position = 0
        for unit in self._units:
            if not torch.is_grad_enabled() or not self._stays(unit):
                unit.free()

    # backward

    def begin_backward(self) -> None:
        """A pass begins: no unit has been reached."""
        if self.backward.sync:
            self._changes.open()
        self._backward_order = self._order.backward
        self._position = 0

    def _before_backward(self, unit: Unit, n_steps: int) -> None:
        self.backward.check_age(n_steps)
        self.backward.begin()
        if torch.is_grad_enabled():  # create_graph: a backward of this backward needs the parameters, too
            for flat in unit.flats:
                flat.keep()
        if unit.has_frozen:  # without a count, an earlier pass has ended it, and this is a second backward
            self._inputs_due.setdefault(id(unit), sys.maxsize)
        if unit in self._backward_order[self._position :]:
            while self._position < len(self._backward_order):
                current = self._backward_order[self._position]
                self._reach_next()
                if current is unit:
                    break
        elif not unit.is_whole:
            unit.ensure_whole(phases.BACKWARD_GATHER)
            self._changes.seen_here |= unit not in self._backward_order
        self._order.see_backward(unit)

    def _reach_next(self) -> None:
        """Runs on every rank when the next unit's backward begins, or would begin if it is skipped."""
        order, here = self._backward_order, self._position
        self._leave_current()
        for near in order[here : here + 1 + self.prefetch]:
            near.start_gather(phases.BACKWARD_GATHER)
        order[here].finish_gather()
        self._position = here + 1

    def on_unit_done(self, unit: Unit) -> None:
        """Frees a unit as soon as nothing in this backward pass needs it."""
        if self.backward.is_done(unit) and self._inputs_due.get(id(unit), 0) <= 0 and unit.is_whole:
            unit.free()

    def finish_units(self) -> None:
        """Gathers the units that were not reached, as other ranks do."""
        while self._position < len(self._backward_order):
            self._reach_next()
        self._leave_current()

    def _leave_current(self) -> None:
        if self._position and self.backward.sync:
            self._backward_order[self._position - 1].schedule.flush_timely()

    def end_backward(self) -> None:
        """Frees the rest: the root, and layers with frozen or unused parameters."""
        self._inputs_due.clear()
        self.free_all()
        if self.backward.sync and (self._changes.close() or not self._order.is_learned):
            self._order.agree(self._world)
            self._changes.seen_here = False

    def free_all(self) -> None:
        """Leaves only shards."""
        for unit in self._units:
            unit.free()
