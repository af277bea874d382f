"""Stage 3: a layer's parameters are whole only around its use.

    forward   gather 0 │ use 0, gather 1 │ free 0, use 1, gather 2 │ …            one gather per layer
    backward  (last is still whole) use n │ free n, use n−1, gather n−2 │ …       one less

The next layer is gathered while this one computes; in backward, the previous one. The order is learned from
the last forward pass, and before the first one it is the model's own. The layer that ends the forward begins
the backward, so it stays; the root, whose parameters may be used anywhere, stays from its forward to the end
of backward. With n layers besides the root that makes the 2n − 1 gathers of ZeRO-3, and one for the root.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zero_runtime import phases
from zero_runtime.backward import BackwardPass
from zero_runtime.errors import LifecycleError
from zero_runtime.lifecycle import State
from zero_runtime.unit import Unit


def differentiable(value: Any) -> Iterator[Tensor]:
    """The tensors inside `value` through which a gradient will flow."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from differentiable([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


class PartitionedParameters:
    """Gathers and frees units by hooks on their modules.

    Args:
        units: in the model's order, the root first if it has parameters of its own.
        prefetch: units gathered ahead of the one in use.
        reshard_after_forward: False keeps every unit until its backward.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit], prefetch: int, reshard_after_forward: bool) -> None:
        self._root = root
        self._units = tuple(units)
        self._prefetch = prefetch
        self._reshard = reshard_after_forward
        self.backward: BackwardPass
        self._last_order: list[Unit] = list(units)
        self._order: list[Unit] = []
        self._backward_order: list[Unit] = []
        self._position = 0
        self._inputs_due: dict[int, int] = {}
        self._handles: list[Any] = []
        for unit in self._units:
            self._watch(unit)
        self._handles.append(root.register_forward_pre_hook(self._begin_forward, prepend=True))  # runs first
        self._handles.append(root.register_forward_hook(self._end_forward))

    def _watch(self, unit: Unit) -> None:
        module = unit.module

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._before_forward(unit, args, kwargs)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._after_forward(unit, output)

        self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after))
        inside = {m for flat in unit.flats for managed in flat.managed for m, _ in managed.holders}
        for holder in inside - {module}:
            self._handles.append(holder.register_forward_pre_hook(self._guard(unit), prepend=True))

    @staticmethod
    def _guard(unit: Unit) -> Callable[[nn.Module, Any], None]:
        def check(module: nn.Module, _: Any) -> None:
            if not unit.is_whole:
                raise LifecycleError(
                    f"the forward of a {type(module).__name__} ran while its parameters, part of {unit.life.name}, "
                    f"are {unit.life.state.value}; call the sharded model itself, or a layer named as a unit"
                )

        return check

    # forward

    def _begin_forward(self, *_: Any) -> None:
        if self.backward.active:
            return
        for unit in self._units:
            for flat in unit.flats:
                if unit.life.state is State.PARTITIONED and (what := flat.intruder()):
                    raise LifecycleError(
                        f"parameter {what} outside the runtime; change parameters through "
                        "engine.full_parameters() or engine.load_state_dict()"
                    )
        self._order = []

    def _before_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.backward.active:  # activation checkpointing computes the layer again
            unit.ensure_whole(phases.BACKWARD_GATHER)
            unit.use()
            return
        here = len(self._order)
        self._order.append(unit)
        unit.ensure_whole(phases.FORWARD_GATHER)
        unit.use()
        if self._last_order[here : here + 1] == [unit]:
            for ahead in self._last_order[here + 1 : here + 1 + self._prefetch]:
                ahead.start_gather(phases.FORWARD_GATHER)
        if unit.has_frozen and torch.is_grad_enabled():
            self._await_inputs(unit, [*differentiable(args), *differentiable(kwargs)])

    def _await_inputs(self, unit: Unit, inputs: list[Tensor]) -> None:
        """Frozen weights are needed until the layer's inputs have their gradients."""
        self._inputs_due[id(unit)] = self._inputs_due.get(id(unit), 0) + len(inputs)

        def arrived(_: Tensor) -> None:
            self._inputs_due[id(unit)] -= 1
            self.on_unit_done(unit)

        for tensor in inputs:
            tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _after_forward(self, unit: Unit, output: Any) -> None:
        if self.backward.active:
            return
        if not torch.is_grad_enabled():
            unit.free()
            return

        def before_backward(_: Tensor) -> None:
            self._before_backward(unit)

        for tensor in differentiable(output):
            tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]
        stays = unit.module is self._root or unit is self._last_order[-1]
        if self._reshard and not stays:
            unit.free()

    def _end_forward(self, *_: Any) -> None:
        if self.backward.active:
            return
        if self._order:
            self._last_order = self._order
        if not torch.is_grad_enabled():
            self.free_all()

    # backward

    def _before_backward(self, unit: Unit) -> None:
        if not self.backward.active:
            self.backward.begin()
            self._backward_order = self._last_order[::-1]
            self._position = 0
        unit.ensure_whole(phases.BACKWARD_GATHER)
        unit.use()
        order = self._backward_order
        if unit in order[self._position :]:
            self._position = order.index(unit, self._position)
            if unit.module is self._root:
                self._position = -1  # begins the pass, wherever it stood in the forward
            for ahead in order[self._position + 1 : self._position + 1 + self._prefetch]:
                ahead.start_gather(phases.BACKWARD_GATHER)
            self._position = max(self._position, 0)

    def on_unit_done(self, unit: Unit) -> None:
        """Frees a unit as soon as nothing in this backward pass needs it."""
        if self.backward.is_done(unit) and self._inputs_due.get(id(unit), 0) <= 0 and unit.is_whole:
            unit.life.to(State.GRADIENT_AVAILABLE)
            unit.life.to(State.REDUCING)
            unit.free()

    def end_backward(self) -> None:
        """Frees what is left: the root, and layers with frozen or unused parameters."""
        self._inputs_due.clear()
        self.free_all()

    def free_all(self) -> None:
        """Leaves only shards."""
        for unit in self._units:
            unit.free()

    def remove(self) -> None:
        """Takes the hooks off the modules."""
        for handle in self._handles:
            handle.remove()
