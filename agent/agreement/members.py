"""This process's communicators as the agreement's thread uses them: answers for rank 0, outcomes for the plugin."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from ...store.records import CommunicatorClass
from ..nccl.library import Plugin, pack_cycle, unpack_cycle
from .protocol import LEAST_CALLS, Member, Outcome, PlanChange, Why

FIRST_LEAD_S: Final = 0.25
LEAST_LEAD_S: Final = 0.05
MOST_LEAD_S: Final = 4.0
"""How far ahead a promise lies, in seconds of calls: twice the time of recent changes, within these limits."""
LEAST_PACED_S: Final = 1.0
"""The call rate of a communicator is measured over at least this time."""
PATIENT_STEPS: Final = 20
PATIENT_CALLS: Final = 200
"""A plan with phases waits this many steps, or calls of a rank without steps, for a cycle; then it does without."""
FORGOTTEN: Final = 0.25
"""Weight of the latest change if it took less time than earlier changes; a longer time counts at once."""


class Members:
    """One rank's memberships. Used by the agreement's thread alone."""

    def __init__(self, plugin: Plugin, world_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._plugin = plugin
        self._world_size = world_size
        self._clock = clock
        self._switched_to: dict[int, int] = {}
        """Epoch of the latest plan that a communicator was switched to, by owner."""
        self._began_s = clock()
        self._marks: dict[int, tuple[float, int]] = {}
        """(time, number of calls) of a communicator, by owner, from which its call rate is measured."""
        self._promised: dict[str, int] = {}
        """The owner of each communicator that has promised a call, by key."""
        self._promised_at_s = 0.0
        self._epoch = 0
        self._lead_s = FIRST_LEAD_S

    def answer(self, change: PlanChange) -> tuple[Member, ...]:
        """Prepare the plan, and promise a call on each communicator; `carry_out` must follow.

        If this NCCL cannot follow the plan, this raises `PlanError`, and nothing is promised.
        """
        self._plugin.prepare(change.plan)
        self._epoch = change.plan.last_epoch
        now_s = self._promised_at_s = self._clock()
        found = [row for row in self._plugin.communicators() if row["n_ranks"] > 1]
        alive = {int(row["owner"]) for row in found}
        self._switched_to = {owner: epoch for owner, epoch in self._switched_to.items() if owner in alive}
        self._marks = {owner: mark for owner, mark in self._marks.items() if owner in alive}
        keys = [_key(row) for row in found]
        n_of = Counter(keys)
        return tuple(self._member(row, key, change, now_s, n_of[key]) for key, row in zip(keys, found, strict=True))

    def give_up(self) -> None:
        """Release all promised calls: no answer was written."""
        for owner in self._promised.values():
            self._plugin.release(owner)
        self._promised.clear()
        self._plugin.prepare_end()

    def carry_out(self, outcome: Outcome) -> bool:
        """Switch the outcome's communicators and release the other promised calls.

        False means that a call gave up waiting, so that this rank cannot follow the outcome.
        """
        can_follow = True
        cycles = [unpack_cycle(each) for each in outcome.cycles]
        for key, owner in self._promised.items():
            if key in outcome.switches:
                switch = outcome.switches[key]
                cycle = cycles[switch.cycle] if switch.cycle >= 0 else b""
                can_follow &= self._plugin.commit(owner, switch.from_calls, cycle)
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

    def _member(self, row: Any, key: str, change: PlanChange, now_s: float, n_alike: int) -> Member:
        owner, n_calls = int(row["owner"]), int(row["n_calls"])
        marked_s, marked_calls = self._marks.get(owner, (self._began_s, 0))
        pace = (n_calls - marked_calls) / max(now_s - marked_s, LEAST_LEAD_S)
        if now_s - marked_s > LEAST_PACED_S:
            self._marks[owner] = now_s, n_calls
        shape = CommunicatorClass(int(row["n_ranks"]), int(row["n_nodes"]))
        rows = (each for _, stage in change.plan.stages() for each in stage.rows)
        needs_cycle = any(each.phase is not None and each.communicator == shape for each in rows)
        after_step = change.plan.gathers_after_step
        cycle = self._plugin.cycle(owner, gathers_after_step=after_step) if needs_cycle else b""
        why, promise = "", 0
        if n_alike > 1 or (not row["comm_id"] and row["n_ranks"] != self._world_size):
            why = Why.ambiguous.name
        elif n_calls < LEAST_CALLS:
            why = Why.too_few_calls.name
        else:
            promise = self._plugin.promise(owner, 1 + math.ceil(pace * self._lead_s))
            waits = needs_cycle and not cycle and _may_repeat(row)  # `decide` asks the lowest rank alone
            why = Why.too_near.name if not promise else Why.no_cycle.name if waits else ""
        if promise:
            self._promised[key] = owner
        is_off_cycle = cycle and row["n_off_cycle"] > 2 * row["calls_per_step"]
        checkpoints = zip(row["checkpoint_calls"].tolist(), row["checkpoint_hash"].tolist(), strict=True)
        return Member(
            key=key,
            n_ranks=int(row["n_ranks"]),
            promise=promise,
            epoch=0 if is_off_cycle else self._switched_to.get(owner, 0),
            why=why,
            checkpoints=tuple((calls, hashed) for calls, hashed in checkpoints if calls),
            step_began=int(row["step_began"]),
            calls_per_step=int(row["calls_per_step"]),
            n_steady=int(row["n_steady"]),
            cycle=pack_cycle(cycle),
        )


def _may_repeat(row: Any) -> bool:
    """Whether a cycle may still be found: the communicator has had few steps."""
    return bool(row["n_steps"] < PATIENT_STEPS and (row["n_steps"] > 0 or row["n_calls"] < PATIENT_CALLS))


def _key(row: Any) -> str:
    """A communicator's name, the same on all of its ranks.

    Before tuner v5 NCCL gives no id, and the shape is the name. It identifies only a communicator of the whole job:
    there may be several of a smaller shape, and a missing rank would not be noticed.
    """
    comm_id = int(row["comm_id"])
    return f"{comm_id:016x}" if comm_id else f"{int(row['n_ranks'])}x{int(row['n_nodes'])}"
