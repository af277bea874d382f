"""The agreement protocol as pure values and functions: no threads, no sockets, no clocks.

NCCL requires that ranks of a communicator issue the same collectives in the same order. So a plan comes into force on a
communicator at a *call number*, which every rank counts for itself. A change takes two phases:

1. Rank 0 writes a `PlanChange`. Each rank prepares the plan and promises, for each of its communicators, not to pass a
   certain call before it knows the outcome. It adds these promises as its `Answer`.
2. The `Outcome` is written once, by compare-and-set. Rank 0 writes which communicators switch, and at which calls. A
   rank that waited for too long writes that none switches.

A communicator switches only if all of its ranks answered, at or after the furthest of their promises. `Proposer`
chooses the change that rank 0 asks for, `decide` its outcome. The model checker in tests/agreement drives both.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final, TypeVar

import msgspec

from ...store.errors import WireError
from ...store.records import Ordinal, Plan

BASELINE_PLAN: Final = Plan(epoch=0)
"""The plan that every job starts with."""
LEAST_STEADY: Final = 2
"""After this many whole steps in a row with equally many calls, changes begin where a step begins."""
LEAST_CALLS: Final = 8
"""Calls of a communicator before it is tuned."""

Call = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""Number of a call, from 1. The limit keeps a hostile number within the plugin's integers."""


class Why(Enum):
    """Why a communicator keeps its plan; the value completes "communicator X is not tuned: "."""

    ranks_missing = "not all of its ranks answered"
    too_near = "a rank could not promise a call"
    ambiguous = "this NCCL does not name communicators, and this one cannot be told from others"
    too_few_calls = "it has had too few calls"
    no_cycle = "its steps do not repeat yet"
    far_apart = "its ranks are too far apart to compare what they issued"
    histories_differ = "its ranks issued different collectives"

    @property
    def is_temporary(self) -> bool:
        """Whether the reason may disappear, so that asking again is worthwhile."""
        return self not in (Why.ambiguous, Why.histories_differ)


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One rank's report about one of its communicators.

    `promise` is the first call that it does not pass before it knows the outcome; 0: it promises nothing, because of
    `why`. With a promise, `why` may be `no_cycle`. `epoch` is that of the latest plan that the communicator was
    switched to. `checkpoints` are (number of calls, hash of these calls). `step_began` is the first call of this rank's
    latest step; `n_steady` whole steps in a row had `calls_per_step`. `cycle` is a step's calls and their phases,
    packed, if the plan has rows by phase.
    """

    key: str
    n_ranks: int
    promise: Call
    epoch: int = 0
    why: str = ""
    checkpoints: tuple[tuple[int, int], ...] = ()
    step_began: Call = 0
    calls_per_step: Call = 0
    n_steady: int = 0
    cycle: bytes = b""


class PlanChange(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's request that all communicators switch to `plan`."""

    number: Ordinal
    plan: Plan


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One rank's answer to a change; `refusal` says why it cannot follow the plan at all; empty: it can."""

    number: int
    rank: int
    members: tuple[Member, ...] = ()
    refusal: str = ""


class Switch(msgspec.Struct, frozen=True, array_like=True):
    """Stage i of the plan is in force on a communicator from its call `from_calls[i]` on.

    `cycle` is an index into the outcome's cycles, which gives the phases of calls; -1: phases are unknown.
    """

    from_calls: tuple[Call, ...]
    cycle: int = -1


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """The result of a change: the communicators that switch, and why others do not."""

    number: int
    switches: dict[str, Switch] = {}
    left_alone: dict[str, Call] = {}
    """Communicators that return to NCCL's own choice for good, and from which call on."""
    reasons: dict[str, str] = {}
    """By communicator: a member of `Why`."""
    cycles: tuple[bytes, ...] = ()
    """Without repetitions: thousands of communicators share a few cycles."""
    is_given_up: bool = False
    """Whether a rank waited for too long: nothing switches."""


_FRAME: Final = struct.Struct("<II")
"""Rank, and number of bytes that follow."""
_encoder = msgspec.msgpack.Encoder()
Message = TypeVar("Message", PlanChange, Answer, Outcome)


def encode(message: PlanChange | Answer | Outcome) -> bytes:
    """The bytes for the store."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[Message]) -> Message:
    """The message in `data`; raises `WireError` if that is none of this kind."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"{kind.__name__.lower()} cannot be decoded: {error}") from error


def framed(rank: int, data: bytes) -> bytes:
    """A rank's `data` as it appends them to a key of all ranks."""
    return _FRAME.pack(rank, len(data)) + data


def frames(data: bytes) -> dict[int, bytes]:
    """The data that ranks have appended to a key, by rank; of repeated data the last count."""
    found, at = {}, 0
    while at + _FRAME.size <= len(data):
        rank, n_bytes = _FRAME.unpack_from(data, at)
        at += _FRAME.size + n_bytes
        found[rank] = data[at - n_bytes : at]
    return found


def decode_outcome(data: bytes, change: PlanChange) -> Outcome:
    """The outcome of `change` in `data`; raises `WireError` if that is no outcome, or contradicts the change."""
    outcome, n_stages = decode(data, Outcome), len(change.plan.stages())
    fits = (len(s.from_calls) == n_stages and -1 <= s.cycle < len(outcome.cycles) for s in outcome.switches.values())
    if outcome.number != change.number or not all(fits):
        raise WireError(f"outcome {outcome.number} contradicts change {change.number}")
    return outcome


def decide(change: PlanChange, answers: Iterable[Answer], left_alone: Iterable[str] = ()) -> Outcome:
    """The outcome of `change`, from the answers received, at most one of each rank.

    A communicator switches if all its ranks promised and have one history, unless it is at this epoch already.
    `left_alone` are communicators whose ranks have issued different collectives.
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
        why = _why_not(members, n_answered=len(by_rank))
        if key in left_alone or _differ(members):
            if why in (None, Why.far_apart) and key not in left_alone:
                given_up[key] = max(member.promise for member in members)
            why = Why.histories_differ
        if why is None and by_rank[min(by_rank)][0].why == Why.no_cycle.name:
            why = Why.no_cycle
        if why is None:
            ready[key] = {rank: group[0] for rank, group in by_rank.items()}
        else:
            reasons[key] = why.name
    switches, cycles = _switch_calls(ready, [n_steps for n_steps, _ in change.plan.stages()])
    return Outcome(change.number, switches, given_up, reasons, cycles)


def _why_not(members: Sequence[Member], n_answered: int) -> Why | None:
    """Why a communicator of these members cannot switch; None: it can."""
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


def _switch_calls(
    ready: Mapping[str, Mapping[int, Member]], stage_steps: Sequence[int]
) -> tuple[dict[str, Switch], tuple[bytes, ...]]:
    """Call numbers at which stages begin: where a step of the communicator's lowest rank begins.

    All communicators with the same lowest rank switch at the same of its steps. The cycles are those to which the
    switches refer.

    Args:
        ready: members by communicator and rank.
        stage_steps: steps from the beginning of the first stage to that of each stage; the first is 0.
    """
    leads = {key: min(by_rank.items())[1] for key, by_rank in ready.items()}
    lowest = {key: min(by_rank) for key, by_rank in ready.items()}
    furthest = {key: max(each.promise for each in by_rank.values()) for key, by_rank in ready.items()}
    steady = {key for key, lead in leads.items() if lead.n_steady >= LEAST_STEADY and lead.calls_per_step}
    n_steps_ahead: dict[int, int] = {}
    for key in steady:
        n_steps = math.ceil((furthest[key] - leads[key].step_began) / leads[key].calls_per_step)
        n_steps_ahead[lowest[key]] = max(n_steps, n_steps_ahead.get(lowest[key], 1))
    switches: dict[str, Switch] = {}
    cycles: dict[bytes, int] = {}
    for key, lead in leads.items():
        begins, cycle = furthest[key], -1
        if key in steady:
            begins = lead.step_began + n_steps_ahead[lowest[key]] * lead.calls_per_step
            cycle = cycles.setdefault(lead.cycle, len(cycles)) if lead.cycle else -1
        n_calls = max(1, lead.calls_per_step)
        switches[key] = Switch(tuple(begins + n_steps * n_calls for n_steps in stage_steps), cycle)
    return switches, tuple(cycles)


@dataclass(slots=True)
class Proposer:
    """Chooses the change that rank 0 asks for, from the daemon's offers; never waits for an offer."""

    plan: Plan = BASELINE_PLAN
    """The latest plan that was announced."""
    offered: Plan | None = None
    highest: Plan = BASELINE_PLAN
    is_adopted: bool = True
    """Whether a communicator has switched to `plan`."""

    def offer(self, plan: Plan) -> bool:
        """Take the daemon's latest plan; False if its epoch does not rise."""
        if plan == self.plan:
            self.offered = None
            return True
        if plan.epoch < 1 or (plan != self.highest and plan.epoch <= self.highest.last_epoch):
            return False
        self.offered = self.highest = plan
        return True

    def withdraw(self) -> None:
        """The daemon is gone: return to NCCL's own choice."""
        self.offered = None
        if self.plan.rows or self.plan.then:
            self.offered = self.highest = Plan(epoch=self.highest.last_epoch + 1)

    def refuse(self, plan: Plan) -> None:
        """`plan` cannot be loaded here, so no change is announced for it."""
        if self.offered is plan:
            self.offered = None

    def announce(self, number: int, plan: Plan | None) -> PlanChange | None:
        """The change to ask for next; None: there is nothing to ask for.

        `plan` is the offered plan, if the caller could load it. The change is to this plan as long as it is still
        offered. Without an offer, the change is to the plan in force, for communicators that have not adopted it. It
        has the last stage, or all stages if no communicator has the plan.
        """
        if plan is not self.offered:
            return None
        if plan is not None:
            self.plan, self.offered, self.is_adopted = plan, None, False
        if not self.plan.epoch:
            return None
        return PlanChange(number, self.plan.at_last() if self.is_adopted else self.plan)

    def learn(self, outcome: Outcome) -> None:
        """Take the outcome of the change that was announced."""
        self.is_adopted |= bool(outcome.switches)
