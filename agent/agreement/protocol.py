"""The agreement protocol as pure values and functions: no threads, no sockets, no clocks.

Ranks of a communicator issue the same collectives in the same order: that is NCCL's law. So a plan comes into force on
a communicator at a *call number*, which every rank counts for itself. A change takes two phases:

1. Rank 0 writes a `Change`. Each rank prepares its plan, promises for each of its communicators not to pass a certain
   call before it knows the outcome, and writes an `Answer`.
2. The `Outcome` is written once, by compare-and-set: rank 0 may write which communicators switch, at which calls;
   whoever waited for too long writes that none does.

A communicator switches only if all of its ranks answered, at or after the furthest of their promises. `Leader` is what
rank 0 wants, `decide` what it may have. The model checker in tests/agreement drives both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from zerotune.store.errors import WireError
from zerotune.store.records import Plan

BASELINE_PLAN: Final = Plan(epoch=0)
"""What every job starts with."""
LEAST_STEADY: Final = 2
"""Whole steps in a row with equally many calls, before changes are laid where steps begin."""
LEAST_CALLS: Final = 8
"""Calls of a communicator before it is tuned: fewer do not repeat anything."""


class Why(Enum):
    """Why a communicator keeps its plan; `text` completes "communicator X is not tuned: "."""

    ranks_missing = "not all of its ranks answered"
    too_near = "a rank could not promise a call"
    ambiguous = "this NCCL does not name communicators, and several have its shape"
    too_few_calls = "it has had too few calls"
    no_cycle = "its steps do not repeat yet"
    far_apart = "its ranks are too far apart to compare what they issued"
    histories_differ = "its ranks issued different collectives"

    @property
    def may_pass(self) -> bool:
        """Whether it is worth asking again."""
        return self not in (Why.ambiguous, Why.histories_differ)


class Member(msgspec.Struct, frozen=True, array_like=True):
    """What one rank says of one of its communicators.

    `promise` is the first call that it does not pass before it knows the outcome; 0: it promises nothing, for the
    reason `why`. `epoch` is that of the latest plan that the communicator was switched to. `checkpoints` are (number of
    calls, hash of all calls until then). `step_began` is the first call of this rank's latest step; `n_steady` whole
    steps in a row had `calls_per_step`. `cycle` is a step's calls (bytes, collective, phase) if the plan tells phases
    apart.
    """

    key: str
    n_ranks: int
    promise: int
    epoch: int = 0
    why: str = ""
    checkpoints: tuple[tuple[int, int], ...] = ()
    step_began: int = 0
    calls_per_step: float = 0.0
    n_steady: int = 0
    cycle: tuple[tuple[int, int, int], ...] = ()


class Change(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0 would like all communicators to switch to `plan`."""

    number: int
    plan: Plan


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One rank's answer to a change; `refusal` says why it cannot follow the plan at all, empty: it can."""

    number: int
    rank: int
    members: tuple[Member, ...] = ()
    refusal: str = ""


class Switch(msgspec.Struct, frozen=True, array_like=True):
    """Stage i of the plan is in force on a communicator from its call `from_calls[i]` on. `cycle` tells phases."""

    from_calls: tuple[int, ...]
    cycle: tuple[tuple[int, int, int], ...] = ()


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What becomes of a change: the communicators that switch, and why others do not."""

    number: int
    switches: dict[str, Switch] = {}
    left_alone: dict[str, int] = {}
    """Communicators that go back to NCCL's own choice for good, and from which call on."""
    reasons: dict[str, str] = {}
    """By communicator: a member of `Why`."""


_encoder = msgspec.msgpack.Encoder()
_change_decoder = msgspec.msgpack.Decoder(Change)
_answer_decoder = msgspec.msgpack.Decoder(Answer)
_outcome_decoder = msgspec.msgpack.Decoder(Outcome)
_FAULTS: Final = (msgspec.MsgspecError, ValueError, RecursionError)


def encode(message: Change | Answer | Outcome) -> bytes:
    """The bytes that travel through the store."""
    return _encoder.encode(message)


def decode_change(data: bytes) -> Change:
    """The change in `data`.

    Raises:
        WireError: `data` is no change.
    """
    try:
        return _change_decoder.decode(data)
    except _FAULTS as error:
        raise WireError(f"change cannot be decoded: {error}") from error


def decode_answer(data: bytes) -> Answer:
    """The answer in `data`.

    Raises:
        WireError: `data` is no answer.
    """
    try:
        return _answer_decoder.decode(data)
    except _FAULTS as error:
        raise WireError(f"answer cannot be decoded: {error}") from error


def decode_outcome(data: bytes, change: Change) -> Outcome:
    """The outcome of `change` in `data`.

    Raises:
        WireError: `data` is no outcome, or contradicts the change.
    """
    try:
        outcome = _outcome_decoder.decode(data)
    except _FAULTS as error:
        raise WireError(f"outcome cannot be decoded: {error}") from error
    n_stages = len(change.plan.stages())
    if outcome.number != change.number or any(len(each.from_calls) != n_stages for each in outcome.switches.values()):
        raise WireError(f"outcome {outcome.number} contradicts change {change.number}")
    return outcome


def decide(change: Change, answers: Iterable[Answer], left_alone: Iterable[str] = ()) -> Outcome:
    """The outcome of `change`, by the answers that are here.

    Args:
        change: what was asked for.
        answers: one of each rank at most.
        left_alone: communicators whose ranks were seen to differ.

    Returns:
        Each communicator whose ranks all promised and have one history switches, unless it is at this epoch already.
    """
    by_key: dict[str, dict[int, list[Member]]] = {}
    for answer in answers:
        for member in answer.members if not answer.refusal and answer.number == change.number else ():
            by_key.setdefault(member.key, {}).setdefault(answer.rank, []).append(member)
    left_alone = set(left_alone)
    ready: dict[str, dict[int, Member]] = {}
    given_up: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for key, by_rank in by_key.items():
        members = [member for group in by_rank.values() for member in group]
        if all(member.epoch >= change.plan.last_epoch for member in members):
            continue
        why = Why.histories_differ if key in left_alone else _why_not(members, n_answered=len(by_rank))
        if why is None:
            ready[key] = {rank: group[0] for rank, group in by_rank.items()}
        else:
            reasons[key] = why.name
        if why is Why.histories_differ and key not in left_alone and all(member.promise for member in members):
            given_up[key] = max(member.promise for member in members)
    return Outcome(change.number, _lay(ready, [n_steps for n_steps, _ in change.plan.stages()]), given_up, reasons)


def _why_not(members: Sequence[Member], n_answered: int) -> Why | None:
    if _differ(members):
        return Why.histories_differ
    refused = next((member.why for member in members if not member.promise), None)
    if refused is not None:
        return Why.__members__.get(refused, Why.too_near)
    n_ranks = members[0].n_ranks
    if len(members) > n_answered or len(members) > n_ranks or any(each.n_ranks != n_ranks for each in members):
        return Why.ambiguous
    if len(members) < n_ranks:
        return Why.ranks_missing
    compared = set.intersection(*({n_calls for n_calls, _ in member.checkpoints} for member in members))
    return None if compared else Why.far_apart


def _differ(members: Sequence[Member]) -> bool:
    """Whether two members' hashes of the same number of calls differ."""
    known: dict[int, int] = {}
    return any(known.setdefault(n_calls, hashed) != hashed for each in members for n_calls, hashed in each.checkpoints)


def _lay(ready: Mapping[str, Mapping[int, Member]], stage_steps: Sequence[int]) -> dict[str, Switch]:
    """Call numbers at which stages begin: where the lowest rank's steps do, the same step for all it is the lowest of.

    Args:
        ready: members by communicator and rank.
        stage_steps: steps from the first stage's beginning to that of each stage; the first is 0.
    """
    leads = {key: by_rank[min(by_rank)] for key, by_rank in ready.items()}
    furthest = {key: max(each.promise for each in by_rank.values()) for key, by_rank in ready.items()}
    steady = {key for key, lead in leads.items() if lead.n_steady >= LEAST_STEADY and lead.calls_per_step >= 1}
    n_steps_ahead: dict[int, int] = {}
    for key in steady:
        lead, rank = leads[key], min(ready[key])
        n_steps = math.ceil((furthest[key] - lead.step_began) / lead.calls_per_step)
        n_steps_ahead[rank] = max(n_steps, n_steps_ahead.get(rank, 1))
    switches = {}
    for key, lead in leads.items():
        begins = furthest[key]
        if key in steady:
            begins = lead.step_began + n_steps_ahead[min(ready[key])] * int(lead.calls_per_step)
        calls = max(1.0, lead.calls_per_step)
        from_calls = [begins + math.ceil(n_steps * calls) for n_steps in stage_steps]
        switches[key] = Switch(tuple(from_calls), lead.cycle if key in steady else ())
    return switches


@dataclass(slots=True)
class Leader:
    """What rank 0 wants: takes offers from a daemon, never waits for one."""

    plan: Plan = BASELINE_PLAN
    """The latest plan that was announced."""
    offered: Plan | None = None
    highest: Plan = BASELINE_PLAN

    def offer(self, plan: Plan) -> bool:
        """Take the daemon's latest plan; False when its epoch does not rise."""
        if plan == self.plan:
            self.offered = None
            return True
        if plan.epoch < max(1, self.highest.epoch) or (plan.epoch == self.highest.epoch and plan != self.highest):
            return False
        self.offered = self.highest = plan
        return True

    def withdraw(self) -> None:
        """No daemon watches the plan in force any more: go back to NCCL's own choice."""
        self.offered = None
        if self.plan.rows or self.plan.then:
            self.offered = self.highest = Plan(epoch=max(self.highest.last_epoch, self.plan.last_epoch) + 1)

    def refuse(self, plan: Plan) -> None:
        """`plan` cannot be loaded here, so no rank is asked for it."""
        if self.offered is plan:
            self.offered = None

    def announce(self, number: int) -> Change | None:
        """The change to ask for next: what was offered, else None."""
        if self.offered is None:
            return None
        self.plan, self.offered = self.offered, None
        return Change(number, self.plan)

    def repeat(self, number: int) -> Change | None:
        """The plan in force once more, as it rests, for communicators that have it not yet; None: there is none."""
        return Change(number, self.plan.at_last()) if self.plan.epoch else None
