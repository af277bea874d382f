"""The plugin's part in Python: promises, commits and turns, as agree/schedule.c has them; a test holds it to that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zerotune.store.errors import PlanError
from zerotune.store.records import Plan

FIRST_CALLS = 8
"""Calls before the model begins: fewer are not tuned."""
KEPT_CHECKPOINTS = 10


class Numbers(tuple[int, ...]):
    """What numpy gives for a field of several numbers."""

    def tolist(self) -> list[int]:
        return [*self]


@dataclass(frozen=True)
class Shape:
    """A communicator as the job's program has it. `comm_id` 0: NCCL does not name it."""

    name: str
    members: tuple[int, ...]
    comm_id: int
    odd_from: int = 0
    """The highest member issues other calls than its peers from this one on; 0: it does not."""


@dataclass
class Communicator:
    """One rank's side. `stages`: (first call, version of the plan); without any, or before the first: 0."""

    shape: Shape
    rank: int
    calls_per_step: int
    n_calls: int = FIRST_CALLS
    promise: int | None = None
    stages: tuple[tuple[int, int], ...] = ()
    switched_to: int = 0

    def waits(self) -> bool:
        return self.promise is not None and self.n_calls + 1 >= self.promise

    def turn(self) -> tuple[int, int]:
        """The next call passes: its number, and what it runs under."""
        self.n_calls += 1
        return self.n_calls, next((found for first, found in reversed(self.stages) if first <= self.n_calls), 0)

    def hash_at(self, call: int) -> int:
        is_odd = self.shape.odd_from and call >= self.shape.odd_from and self.rank == max(self.shape.members)
        return 1_000 * call + bool(is_odd)


def version(stage: Plan) -> int:
    """What tells a plan without stages from all others here."""
    return 10 * stage.epoch + len(stage.rows)


class PluginModel:
    """What `Members` needs of the plugin. Owners are places in `sides`; None: the communicator was destroyed."""

    def __init__(self, sides: list[Communicator | None], lead: int, refuses: frozenset[int] = frozenset()) -> None:
        self.sides, self.lead, self.refuses = sides, lead, refuses
        self.prepared: Plan | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PluginModel:
        twin = PluginModel([side and replace(side) for side in self.sides], self.lead, self.refuses)
        twin.prepared = self.prepared
        twin.__class__ = self.__class__
        return twin

    def key(self) -> tuple[Any, ...]:
        return tuple(side and (side.n_calls, side.promise, side.stages, side.switched_to) for side in self.sides)

    def communicators(self) -> list[dict[str, Any]]:
        return [self._row(owner, side) for owner, side in enumerate(self.sides) if side is not None]

    def _row(self, owner: int, side: Communicator) -> dict[str, Any]:
        calls = range(max(1, side.n_calls + 1 - KEPT_CHECKPOINTS), side.n_calls + 1)
        return {
            "owner": owner,
            "comm_id": side.shape.comm_id,
            "n_ranks": len(side.shape.members),
            "n_nodes": 1,
            "n_calls": side.n_calls,
            "step_began": side.n_calls // side.calls_per_step * side.calls_per_step + 1,
            "calls_per_step": side.calls_per_step,
            "n_steady": side.n_calls // side.calls_per_step,
            "n_steps": side.n_calls // side.calls_per_step,
            "n_off_cycle": 0,
            "checkpoint_calls": Numbers(calls),
            "checkpoint_hash": Numbers(side.hash_at(call) for call in calls),
        }

    def cycle(self, owner: int, *, gathers_after_step: bool) -> bytes:
        return b""

    def prepare(self, plan: Plan) -> None:
        if plan.epoch in self.refuses:
            raise PlanError(f"epoch {plan.epoch} names an illegal cell")
        self.prepared = plan

    def prepare_end(self) -> None:
        self.prepared = None

    def promise(self, owner: int, lead_calls: int) -> int:
        side = self.sides[owner]
        if side is None or side.promise is not None:
            return 0
        side.promise = side.n_calls + 1 + self.lead
        return side.promise

    def commit(self, owner: int, from_calls: tuple[int, ...], cycle: bytes = b"") -> bool:
        side = self.sides[owner]
        if side is None:
            return True
        assert self.prepared is not None
        if side.promise is None or from_calls[0] < side.promise:
            return False
        stages = [stage for _, stage in self.prepared.stages()]
        self._put(side, tuple(zip(from_calls, map(version, stages), strict=True)))
        side.switched_to = stages[-1].epoch
        return True

    def leave_alone(self, owner: int, from_call: int) -> bool:
        side = self.sides[owner]
        if side is None:
            return True
        if side.promise is None or from_call < side.promise:
            return False
        self._put(side, ((from_call, 0),))
        return True

    def _put(self, side: Communicator, stages: tuple[tuple[int, int], ...]) -> None:
        kept = [stage for stage in side.stages if stage[0] < stages[0][0]]
        while len(kept) > 1 and kept[1][0] <= side.n_calls:
            kept.pop(0)
        side.stages, side.promise = (*kept, *stages), None

    def release(self, owner: int) -> None:
        side = self.sides[owner]
        if side is not None:
            side.promise = None

    def waits(self) -> tuple[int, float, int]:
        return 0, 0.0, sum(side is not None and side.waits() for side in self.sides)
