"""The life cycle of a group of parameters, as a table that refuses every other path.

    partitioned ──► gathering ──► materialised ◄──► in_use ──► gradient_available
         ▲                             │               │               │
         └─────────── free ────────────┴───────────────┘               ▼
         └──────────────────────────────────────────────────────── reducing
    reducing ──► updated ──► partitioned (stage 3) or gathering (stages 1 and 2)

A rank holds `partitioned` parameters only as its own shard; `materialised` ones are whole, `in_use` ones are
being computed with. Stages 1 and 2 never partition parameters, so there the cycle starts at `materialised`.
"""

from __future__ import annotations

from enum import Enum

from zero_runtime.errors import LifecycleError


class State(str, Enum):
    """Where a group of parameters is in its life cycle."""

    PARTITIONED = "partitioned"
    GATHERING = "gathering"
    MATERIALISED = "materialised"
    IN_USE = "in_use"
    GRADIENT_AVAILABLE = "gradient_available"
    REDUCING = "reducing"
    UPDATED = "updated"


LEGAL: dict[State, frozenset[State]] = {
    State.PARTITIONED: frozenset({State.GATHERING, State.UPDATED, State.REDUCING}),
    State.GATHERING: frozenset({State.MATERIALISED}),
    State.MATERIALISED: frozenset(
        {State.IN_USE, State.PARTITIONED, State.GRADIENT_AVAILABLE, State.REDUCING, State.UPDATED}
    ),
    State.IN_USE: frozenset({State.MATERIALISED, State.PARTITIONED, State.GRADIENT_AVAILABLE, State.REDUCING}),
    State.GRADIENT_AVAILABLE: frozenset({State.REDUCING, State.MATERIALISED, State.IN_USE}),
    State.REDUCING: frozenset({State.PARTITIONED, State.MATERIALISED, State.UPDATED}),
    State.UPDATED: frozenset({State.PARTITIONED, State.GATHERING, State.MATERIALISED}),
}


class Lifecycle:
    """The state of one group, changed only along `LEGAL`."""

    __slots__ = ("name", "state")

    def __init__(self, name: str, state: State) -> None:
        self.name = name
        self.state = state

    def to(self, state: State) -> None:
        """Moves on to `state`.

        Raises:
            LifecycleError: the table has no such path.
        """
        if state not in LEGAL[self.state]:
            allowed = ", ".join(sorted(s.value for s in LEGAL[self.state]))
            raise LifecycleError(
                f"{self.name} cannot go from {self.state.value} to {state.value}; from there it may go to {allowed}"
            )
        self.state = state
