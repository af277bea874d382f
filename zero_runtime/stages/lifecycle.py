"""The life cycle of a group of parameters, as a table that refuses every other path.

    partitioned ──► gathering ──► materialised ──► in_use ──► gradient_available ──► reducing ──► updated
         ▲                             ▲              │               │                │  │          │
         │                             └──────────────┤    (accumulates without sync)  │  │          │
         ├── freed after forward ─────────────────────┘               │                │  │          │
         ├── the next micro-batch gathers or uses again ◄─────────────┴────────────────┘  │          │
         └── the step has published new values ◄──────────────────────────────────────────┴──────────┘

`partitioned` parameters are on a rank only as its own shard, `materialised` ones are whole, `in_use` ones are
needed by a forward or backward that is under way. `gradient_available`: this rank's gradients lie in buckets;
`reducing`: the buckets were sent. From then on stage 3 holds a shard only. `updated`: the optimizer has changed
the shard, and nobody has whole new values yet. Stages 1 and 2 never partition parameters: their cycle begins
and ends at `materialised`.
"""

from __future__ import annotations

from enum import Enum

from zerotune.zero_runtime.errors import LifecycleError


class State(str, Enum):
    """Where a group of parameters is in its life cycle."""

    PARTITIONED = "partitioned"
    GATHERING = "gathering"
    MATERIALISED = "materialised"
    IN_USE = "in_use"
    GRADIENT_AVAILABLE = "gradient_available"
    REDUCING = "reducing"
    UPDATED = "updated"


_AT_REST = {State.PARTITIONED, State.MATERIALISED}

LEGAL: dict[State, frozenset[State]] = {
    State.PARTITIONED: frozenset({State.GATHERING, State.REDUCING, State.UPDATED}),
    State.GATHERING: frozenset({State.MATERIALISED}),
    State.MATERIALISED: frozenset(
        {State.IN_USE, State.PARTITIONED, State.GRADIENT_AVAILABLE, State.REDUCING, State.UPDATED}
    ),
    State.IN_USE: frozenset({*_AT_REST, State.GRADIENT_AVAILABLE, State.REDUCING}),
    State.GRADIENT_AVAILABLE: frozenset({*_AT_REST, State.GATHERING, State.IN_USE, State.REDUCING}),
    State.REDUCING: frozenset({*_AT_REST, State.GATHERING, State.IN_USE, State.GRADIENT_AVAILABLE, State.UPDATED}),
    State.UPDATED: frozenset({State.PARTITIONED, State.GATHERING}),
}


class Lifecycle:
    """The state of one group, changed only along `LEGAL`.

    Args:
        at_rest: `partitioned` in stage 3, `materialised` in stages 1 and 2; where the cycle begins and ends.
    """

    __slots__ = ("at_rest", "name", "state")

    def __init__(self, name: str, at_rest: State) -> None:
        self.name = name
        self.at_rest = at_rest
        self.state = at_rest

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
