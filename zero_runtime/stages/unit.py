"""A unit: the parameters that are gathered, used, reduced and freed together; usually one layer.

In stage 3 it cycles `SHARDED -> GATHERING -> WHOLE -> SHARDED`, once in forward and once in backward. In stages 1
and 2 it is whole, except for the gather after each step: `WHOLE -> GATHERING -> WHOLE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from torch import nn

from ..layout.flat_buffer import Flat
from .gradients import FlatGradients, Schedule


class State(str, Enum):
    """State of a unit's parameters on this rank."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    WHOLE = "whole"


class Unit:
    """One module with the flat buffers of its parameters; in stages 1 and 2 the whole model is one unit.

    `at_rest` is `SHARDED` in stage 3 and `WHOLE` in stages 1 and 2.
    """

    def __init__(
        self,
        module: nn.Module,
        flats: Sequence[Flat],
        gradients: Sequence[FlatGradients],
        schedule: Schedule,
        at_rest: State,
    ) -> None:
        self.module = module
        self.flats = tuple(flats)
        self.gradients = tuple(gradients)
        self.schedule = schedule
        self.has_frozen = any(not flat.trainable for flat in flats)
        self._at_rest = at_rest
        self.state = at_rest

    @property
    def is_whole(self) -> bool:
        """Whether computation can use the parameters."""
        return self.state is State.WHOLE

    def start_gather(self, phase: str) -> None:
        """Begins to gather, unless the gather has begun or the unit is whole."""
        if self.state is State.SHARDED:
            self.gather_anew(phase)

    def gather_anew(self, phase: str) -> None:
        """Begins to gather, even if the unit is whole with old values."""
        self.state = State.GATHERING
        for flat in self.flats:
            flat.start_gather(phase)

    def finish_gather(self) -> None:
        """Waits until a running gather is complete."""
        if self.state is State.GATHERING:
            for flat in self.flats:
                flat.finish_gather()
            self.state = State.WHOLE

    def ensure_whole(self, phase: str) -> None:
        """Gathers if necessary, and waits until the parameters can be used."""
        self.start_gather(phase)
        self.finish_gather()

    def free(self) -> None:
        """Ends the use of the parameters: stage 3 drops the whole ones, if there are any."""
        if self._at_rest is State.SHARDED:
            self.finish_gather()  # prefetched and never used
            if self.is_whole:
                self.state = State.SHARDED
                for flat in self.flats:
                    flat.free()
