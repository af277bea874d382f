"""A unit: the parameters that are gathered, used, reduced and freed together; usually one layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zerotune.zero_runtime.layout.flat_buffer import Flat
from zerotune.zero_runtime.stages.gradients import FlatGradients, Schedule
from zerotune.zero_runtime.stages.lifecycle import Lifecycle, State


class Unit:
    """One module with the flat buffers of its parameters; in stages 1 and 2 the whole model is one unit."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        flats: Sequence[Flat],
        gradients: Sequence[FlatGradients],
        schedule: Schedule,
        at_rest: State,
    ) -> None:
        self.name = name
        self.module = module
        self.flats = tuple(flats)
        self.gradients = tuple(gradients)
        self.schedule = schedule
        self.has_frozen = any(not flat.trainable for flat in flats)
        self.life = Lifecycle(f"layer {name or '(root)'}", at_rest)

    @property
    def is_whole(self) -> bool:
        """Whether a stage-3 unit's parameters can be computed with."""
        return self.life.state in (State.MATERIALISED, State.IN_USE)

    def start_gather(self, phase: str) -> None:
        """Begins to gather, unless it has begun or is done."""
        if not self.is_whole and self.life.state is not State.GATHERING:
            self.life.to(State.GATHERING)
            for flat in self.flats:
                flat.start_gather(phase)

    def finish_gather(self) -> None:
        """Waits until what is being gathered is whole."""
        if self.life.state is State.GATHERING:
            for flat in self.flats:
                flat.finish_gather()
            self.life.to(State.MATERIALISED)

    def ensure_whole(self, phase: str) -> None:
        """Gathers if need be and waits until the parameters can be used."""
        self.start_gather(phase)
        self.finish_gather()

    def use(self) -> None:
        """Marks the parameters as being computed with."""
        if self.life.state is not State.IN_USE:
            self.life.to(State.IN_USE)

    def free(self) -> None:
        """Nothing computes with the parameters any more: stage 3 drops the whole ones, if there are any."""
        if self.life.at_rest is State.PARTITIONED:
            self.finish_gather()  # prefetched and never used
        if self.is_whole and self.life.state is not self.life.at_rest:
            self._leave_for(self.life.at_rest)

    def have_gradients(self) -> None:
        """All gradients of this rank are in buckets, and nothing in this backward needs the parameters."""
        if self.life.state is not State.GRADIENT_AVAILABLE:
            self._leave_for(State.GRADIENT_AVAILABLE)

    def send_gradients(self) -> None:
        """The last bucket was sent."""
        if self.life.state is not State.REDUCING:
            self._leave_for(State.REDUCING)

    def forget_gradients(self) -> None:
        """Gradients were dropped."""
        if self.life.state in (State.GRADIENT_AVAILABLE, State.REDUCING):
            self.life.to(self.life.at_rest)

    def _leave_for(self, state: State) -> None:
        was_whole = self.is_whole
        self.life.to(state)
        if was_whole and self.life.at_rest is State.PARTITIONED:
            for flat in self.flats:
                flat.free()
