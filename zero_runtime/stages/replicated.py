"""Stages 1 and 2: every rank keeps whole parameters and updates its slices; a gather after the step shares them.

The gather is issued chunk by chunk right after the optimizer step and continues while the next forward begins: a layer
waits only for the chunks with its own parameters. Chunks of parameters outside of layers come first, as they may be
used anywhere; otherwise a norm behind the last layer would delay all of forward. Other chunks follow in model order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import phases
from ..layout.flat_buffer import Flat
from .backward import BackwardPass
from .partitioned import differentiable
from .unit import State, Unit


class ReplicatedParameters:
    """Publishes updated slices after a step, and makes each layer wait for its parameters.

    Args:
        layers: modules that wait only for their own parameters.
        overlap: False waits for everything within the step.
    """

    def __init__(self, root: nn.Module, unit: Unit, layers: Sequence[nn.Module], overlap: bool) -> None:
        self._unit = unit
        self._overlap = overlap
        self.backward: BackwardPass
        slot_of = {id(p): (flat, i) for flat in unit.flats for i, p in enumerate(flat.parameters)}
        inside = {id(p) for layer in layers for p in layer.parameters()}
        root.register_forward_pre_hook(self._begin_forward, prepend=True)
        # Every module with parameters waits, too, as it may be called without the layer around it.
        holders = {module for flat in unit.flats for managed in flat.managed for module, _ in managed.holders}
        for module in {*layers, *holders} - {root}:
            self._hold(module, self._needs(slot_of, [p for p in module.parameters() if id(p) in slot_of]))
        rest = [p for p in root.parameters() if id(p) not in inside and id(p) in slot_of]
        self._root_needs = self._needs(slot_of, rest)
        for flat, chunks in self._root_needs:
            flat.gather_first(chunks)
        root.register_forward_hook(self._end_forward)

    @staticmethod
    def _needs(
        slot_of: dict[int, tuple[Flat, int]], parameters: Sequence[nn.Parameter]
    ) -> list[tuple[Flat, list[int]]]:
        chunks: dict[int, tuple[Flat, set[int]]] = {}
        for parameter in parameters:
            flat, slot = slot_of[id(parameter)]
            chunks.setdefault(id(flat), (flat, set()))[1].update(flat.layout.chunks_of(flat.layout.slots[slot]))
        return [(flat, sorted(indices)) for flat, indices in chunks.values()]

    def _hold(self, module: nn.Module, needs: list[tuple[Flat, list[int]]]) -> None:
        unit = self._unit

        def before(*_: Any) -> None:
            if unit.state is State.GATHERING:
                for flat, chunks in needs:
                    flat.finish_gather(chunks)

        module.register_forward_pre_hook(before, prepend=True)

    def _begin_forward(self, *_: Any) -> None:
        if self.backward.is_under_way():
            return
        for flat, chunks in self._root_needs:
            flat.finish_gather(chunks)

    def _end_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        if self.backward.active:
            return
        self.finish()
        if not torch.is_grad_enabled():
            return
        n_steps = self.backward.n_steps

        def before_backward(_: Any) -> None:
            self.backward.check_age(n_steps)
            self.backward.begin()

        for tensor in differentiable(output):
            tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]

    def begin_backward(self) -> None:
        """Waits for the last gather, as a part of the model may have run without the model's forward."""
        self.finish()

    def on_unit_done(self, unit: Unit) -> None:
        """All gradients are in buckets; parameters stay as they are."""

    def finish_units(self) -> None:
        """Nothing to gather: parameters are whole."""

    def end_backward(self) -> None:
        """Nothing to free, and no order to agree on."""

    def after_step(self) -> None:
        """Begins to gather the updated slices."""
        self.finish()
        self._unit.gather_anew(phases.POST_STEP_GATHER)
        if not self._overlap:
            self.finish()

    def finish(self) -> None:
        """Waits until every parameter is whole and up to date."""
        self._unit.finish_gather()
