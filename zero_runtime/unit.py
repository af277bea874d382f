"""A unit: the parameters that are gathered, used, reduced and freed together; usually one layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zero_runtime.flat import Flat
from zero_runtime.gradients import FlatGradients, Schedule
from zero_runtime.lifecycle import Lifecycle, State


class Unit:
    """One module with the flat buffers of its parameters (stage 3)."""

    def __init__(self, name: str, module: nn.Module, flats: Sequence[Flat], gradients: Sequence[FlatGradients]) -> None:
        self.name = name
        self.module = module
        self.flats = tuple(flats)
        self.gradients = tuple(gradients)
        self.has_frozen = any(not flat.trainable for flat in flats)
        self.schedule: Schedule
        self.life = Lifecycle(f"layer {name or '(root)'}", State.PARTITIONED)

    @property
    def is_whole(self) -> bool:
        """Whether the parameters can be computed with."""
        return self.life.state in (State.MATERIALISED, State.IN_USE, State.GRADIENT_AVAILABLE)

    def start_gather(self, phase: str) -> None:
        """Begins to gather, unless it has begun or is done."""
        if self.life.state in (State.PARTITIONED, State.UPDATED):
            self.life.to(State.GATHERING)
            for flat in self.flats:
                flat.start_gather(phase)

    def ensure_whole(self, phase: str) -> None:
        """Gathers if need be and waits until the parameters can be used."""
        self.start_gather(phase)
        if self.life.state is State.GATHERING:
            for flat in self.flats:
                flat.finish_gather()
            self.life.to(State.MATERIALISED)

    def use(self) -> None:
        """Marks the parameters as being computed with."""
        if self.life.state is not State.IN_USE:
            self.life.to(State.IN_USE)

    def free(self) -> None:
        """Drops the whole parameters, if there are any."""
        if self.life.state is State.PARTITIONED:
            return
        if self.life.state is State.GATHERING:  # prefetched and never used
            for flat in self.flats:
                flat.finish_gather()
            self.life.to(State.MATERIALISED)
        self.life.to(State.PARTITIONED)
        for flat in self.flats:
            flat.free()
