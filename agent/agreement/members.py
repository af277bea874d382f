"""This process's communicators as the agreement's thread uses them: answers for rank 0, outcomes for the plugin."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from zerotune.agent.agreement.protocol import LEAST_CALLS, Change, Member, Outcome, Why
from zerotune.store.records import CommunicatorClass, Plan

FIRST_LEAD_S: Final = 0.25
LEAST_LEAD_S: Final = 0.05
MOST_LEAD_S: Final = 4.0
"""How far ahead a promise lies, in seconds of calls: twice what recent changes took, within these."""
PATIENT_STEPS: Final = 20
PATIENT_CALLS: Final = 200
"""So many steps, or calls of a rank without steps, may pass before a plan that tells phases apart does without."""
LEAST_PACED_S: Final = 1.0
"""The pace of a communicator's calls is told over at least this time."""
FORGOTTEN: Final = 0.25
"""Weight of the latest change when it took less time than those before; one that took longer counts at once."""


class PlanHolder(Protocol):
    """The part of `zerotune.agent.nccl.library.Plugin` that plans by agreement need."""

    def communicators(self) -> NDArray[np.void]:
        """COMMUNICATOR_DTYPE, shape (n,)."""

    def cycle(self, owner: int, *, gathers_after_step: bool) -> tuple[tuple[int, int, int], ...]:
        """(bytes, collective, phase) of a step's calls."""

    def prepare(self, plan: Plan) -> None:
        """Build the stages of a plan."""

    def prepare_end(self) -> None:
        """Forget them."""

    def promise(self, owner: int, lead_calls: int) -> int:
        """The first call that does not pass; 0: nothing is promised."""

    def commit(self, owner: int, from_calls: Sequence[int], cycle: Sequence[tuple[int, int, int]] = ()) -> bool:
        """Put the stages in force at these calls."""

    def leave_alone(self, owner: int, from_call: int) -> bool:
        """Put NCCL's own choice in force at this call."""

    def release(self, owner: int) -> None:
        """Let calls pass."""

    def waits(self) -> tuple[int, float, int]:
        """Calls that waited, the longest wait in microseconds, and calls that wait now."""


class Members:
    """One rank's memberships. Used by the agreement's thread alone."""

    def __init__(self, plugin: PlanHolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._plugin = plugin
        self._clock = clock
        self._switched_to: dict[int, int] = {}
        """Epoch of the latest plan that a communicator was switched to, by owner."""
        self._began_s = clock()
        self._marks: dict[int, tuple[float, int]] = {}
        """When a communicator had how many calls, by owner: what the pace of its calls is told by."""
        self._promised: dict[str, int] = {}
        """The owner of each communicator that has promised a call."""
        self._promised_at_s = 0.0
        self._lead_s = FIRST_LEAD_S

    def answer(self, change: Change) -> tuple[Member, ...]:
        """Prepare the plan, and promise a call on each communicator; `carry_out` must follow.

        Raises:
            PlanError: this NCCL cannot follow the plan; nothing is promised.
        """
        self._plugin.prepare(change.plan)
        now_s = self._promised_at_s = self._clock()
        found = [row for row in self._plugin.communicators() if row["n_ranks"] > 1]
        alive = {int(row["owner"]) for row in found}
        self._switched_to = {owner: epoch for owner, epoch in self._switched_to.items() if owner in alive}
        self._marks = {owner: mark for owner, mark in self._marks.items() if owner in alive}
        keys = [_key(row) for row in found]
        n_of = Counter(keys)
        return tuple(self._member(row, key, change, now_s, n_of[key]) for key, row in zip(keys, found, strict=True))

    def give_up(self) -> None:
        """Let all calls pass that were promised not to: no answer was written."""
        for owner in self._promised.values():
            self._plugin.release(owner)
        self._promised.clear()
        self._plugin.prepare_end()

    def carry_out(self, outcome: Outcome) -> bool:
        """Switch what switches and let the other calls pass; False: a call had given up waiting and cannot follow."""
        can_follow = True
        for key, owner in self._promised.items():
            if key in outcome.switches:
                switch = outcome.switches[key]
                can_follow &= self._plugin.commit(owner, switch.from_calls, switch.cycle)
                self._switched_to[owner] = max(self._switched_to.get(owner, 0), self._epoch)
            elif key in outcome.left_alone:
                can_follow &= self._plugin.leave_alone(owner, outcome.left_alone[key])
            else:
                self._plugin.release(owner)
        took_s = 2.0 * (self._clock() - self._promised_at_s)
        lead_s = max(took_s, self._lead_s + FORGOTTEN * (took_s - self._lead_s)) if self._promised else self._lead_s
        self._lead_s = min(MOST_LEAD_S, max(LEAST_LEAD_S, lead_s))
        self._promised.clear()
        self._plugin.prepare_end()
        return can_follow

    def _member(self, row: Any, key: str, change: Change, now_s: float, n_alike: int) -> Member:
        owner, n_calls = int(row["owner"]), int(row["n_calls"])
        marked_s, marked_calls = self._marks.get(owner, (self._began_s, 0))
        pace = (n_calls - marked_calls) / max(now_s - marked_s, LEAST_LEAD_S)
        if now_s - marked_s > LEAST_PACED_S:
            self._marks[owner] = now_s, n_calls
        shape = CommunicatorClass(int(row["n_ranks"]), int(row["n_nodes"]))
        needs_cycle = any(
            each.phase is not None and each.communicator == shape
            for _, stage in change.plan.stages()
            for each in stage.rows
        )
        cycle = self._plugin.cycle(owner, gathers_after_step=change.plan.gathers_after_step) if needs_cycle else ()
        why, promise = "", 0
        if n_alike > 1:
            why = Why.ambiguous.name
        elif n_calls < LEAST_CALLS:
            why = Why.too_few_calls.name
        elif needs_cycle and not cycle and _may_repeat(row):
            why = Why.no_cycle.name
        else:
            promise = self._plugin.promise(owner, 1 + math.ceil(pace * self._lead_s))
            why = "" if promise else Why.too_near.name
        if promise:
            self._promised[key] = owner
            self._epoch = change.plan.last_epoch
        epoch = self._switched_to.get(owner, 0)
        if needs_cycle and row["n_off_cycle"] > 2 * len(cycle):
            epoch = 0  # its calls repeat otherwise than they did
        checkpoints = zip(row["checkpoint_calls"].tolist(), row["checkpoint_hash"].tolist(), strict=True)
        return Member(
            key=key,
            n_ranks=int(row["n_ranks"]),
            promise=promise,
            epoch=epoch,
            why=why,
            checkpoints=tuple((calls, hashed) for calls, hashed in checkpoints if calls),
            step_began=int(row["step_began"]),
            calls_per_step=float(row["calls_per_step"]),
            n_steady=int(row["n_steady"]),
            cycle=cycle,
        )


def _may_repeat(row: Any) -> bool:
    """Whether its steps may still turn out to have the same calls, by which phases are told apart."""
    return bool(row["n_steps"] < PATIENT_STEPS and (row["n_steps"] > 0 or row["n_calls"] < PATIENT_CALLS))


def _key(row: Any) -> str:
    """A communicator's name, the same on all of its ranks; before tuner v5 NCCL gives none, and its shape must do."""
    comm_id = int(row["comm_id"])
    return f"{comm_id:016x}" if comm_id else f"{int(row['n_ranks'])}x{int(row['n_nodes'])}"
