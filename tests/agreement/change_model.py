"""A job under agreement: every thread's next action, on the pure code of agent/agreement and a model of the plugin.

What a rank's background thread does is `zerotune.agent.agreement.agreement.Agreement`, cut where others can come in
between. Actions are (name, function of a copied state, rank that it touches). A name with "!" is a failure or a clock
that ran out; each costs one of `Bounds.n_failures`, so that what must come can be asked of the rest.

What is left out, and why no state is missed: calls of different ranks share nothing, and on its own rank a call matters
to the background thread only by how many there were when it promised. A call below the promise runs the same before
the outcome and after it; one above waits. So calls are made where a rank promises, in every number, and at the end.
Cuts between two communicators of one rank are left out: what is done to one commutes with the calls of the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from plugin_model import Communicator, PluginModel, Shape, version

from zerotune.agent.agreement.members import Members
from zerotune.agent.agreement.protocol import (
    Answer,
    Outcome,
    PlanChange,
    Proposer,
    Why,
    decide,
    decode,
    decode_outcome,
    encode,
)
from zerotune.store.records import Plan

Action = tuple[str, Callable[["State"], None], int | None]


class Violation(Exception):
    """The protocol has broken a promise."""


@dataclass(frozen=True)
class Bounds:
    """The job that is explored. `programs`: of each rank its threads, and of each thread the communicators it calls.

    "X" in a program destroys communicator "x". `offers`: what the daemon offers one after another, at any time;
    None: it is gone for so long that the plan is withdrawn.
    """

    shapes: tuple[Shape, ...]
    programs: tuple[tuple[tuple[str, ...], ...], ...]
    offers: tuple[Plan | None, ...]
    steps: tuple[int, ...] = (2, 3, 5, 7)
    """Calls in a step, by rank."""
    lead: int = 0
    n_failures: int = 0
    n_repeats: int = 2
    most_ahead: int = 2
    """Calls of one thread between two of the background thread's actions that they could matter to."""
    refuses: tuple[int, int] = (0, 0)
    """(Rank, epoch): this rank cannot load that plan."""
    closes: tuple[int, ...] = ()
    """Ranks that may close at any time."""
    reduced: bool = True


@dataclass
class Rank:
    plugin: PluginModel
    members: Members
    at: list[int]
    """Of each thread: how much of its program is done."""
    doing: str = "rest"
    """rest, answer, write, decide, await, tidy; closed or lost: the thread has ended."""
    change: PlanChange | None = None
    answer: Answer | None = None
    next: int = 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Rank:
        plugin = copy.deepcopy(self.plugin, memo)
        memo[id(self.plugin)] = plugin
        members = copy.deepcopy(self.members, memo)
        return Rank(plugin, members, [*self.at], self.doing, self.change, self.answer, self.next)

    def key(self) -> tuple[Any, ...]:
        number = self.change and self.change.number
        return self.plugin.key(), tuple(self.at), self.doing, number, self.answer, self.next


@dataclass
class State:
    ranks: list[Rank]
    store: dict[str, bytes] = field(default_factory=dict)
    ran: dict[tuple[str, int], tuple[Any, int]] = field(default_factory=dict)
    """Of each call that not all ranks have passed yet: what it ran under, and how many have."""
    proposer: Proposer = field(default_factory=Proposer)
    left_alone: frozenset[str] = frozenset()
    absent: frozenset[int] = frozenset()
    answered: frozenset[int] = frozenset()
    wants_repeat: bool = False
    n_offers: int = 0
    n_failures: int = 0
    n_repeats: int = 0

    def copied(self, touched: int | None) -> State:
        twin = copy.copy(self)
        twin.ranks = [*self.ranks]
        for rank in range(len(self.ranks)) if touched is None else (touched,):
            twin.ranks[rank] = copy.deepcopy(self.ranks[rank])
        twin.store, twin.ran, twin.proposer = dict(self.store), dict(self.ran), copy.copy(self.proposer)
        return twin

    def key(self) -> tuple[Any, ...]:
        return (
            tuple(rank.key() for rank in self.ranks),
            tuple(sorted(self.store.items())),
            tuple(sorted(self.ran.items())),
            (self.proposer.plan.epoch, self.proposer.offered and self.proposer.offered.epoch, self.proposer.is_adopted),
            (self.proposer.highest.epoch, self.left_alone, self.absent, self.answered, self.wants_repeat),
            (self.n_offers, self.n_failures, self.n_repeats),
        )


class Model:
    """Mutants override its methods, or the classes it makes of its parts."""

    plugin_type: type[PluginModel] = PluginModel
    members_type: type[Members] = Members
    proposer_type: type[Proposer] = Proposer

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.n_ranks = len(bounds.programs)
        self.shapes = {shape.name: shape for shape in bounds.shapes}

    def initial(self) -> State:
        ranks = []
        for rank in range(self.n_ranks):
            sides: list[Communicator | None] = [
                Communicator(shape, rank, self.bounds.steps[rank])
                for shape in self.bounds.shapes
                if rank in shape.members
            ]
            refuses = frozenset({self.bounds.refuses[1]} if self.bounds.refuses[0] == rank else ())
            plugin = self.plugin_type(sides, self.bounds.lead, refuses)
            members = self.members_type(plugin, self.n_ranks, _no_clock)  # type: ignore[arg-type]
            ranks.append(Rank(plugin, members, [0] * len(self.bounds.programs[rank])))
        return State(ranks, proposer=self.proposer_type())

    # ---- training ----------------------------------------------------------------------------

    def next_op(self, state: State, rank: int, thread: int) -> str | None:
        program, at = self.bounds.programs[rank][thread], state.ranks[rank].at[thread]
        return program[at] if at < len(program) else None

    def can_train(self, state: State, rank: int, thread: int) -> bool:
        op = self.next_op(state, rank, thread)
        if op is None:
            return False
        side = self.side(state, rank, op.lower())
        return side is not None and (op.isupper() or not side.waits())

    def side(self, state: State, rank: int, name: str) -> Communicator | None:
        return next((side for side in state.ranks[rank].plugin.sides if side and side.shape.name == name), None)

    def ran_under(self, side: Communicator, stage: int) -> Any:
        return stage

    def train(self, state: State, rank: int, thread: int) -> None:
        """One call passes. Ranks do not wait for one another's calls, which is harsher than a job."""
        op = self.next_op(state, rank, thread)
        assert op is not None
        state.ranks[rank].at[thread] += 1
        side = self.side(state, rank, op.lower())
        assert side is not None
        if op.isupper():
            plugin = state.ranks[rank].plugin
            plugin.sides[plugin.sides.index(side)] = None
            return
        call, stage = side.turn()
        here = self.ran_under(side, stage)
        known, n_passed = state.ran.pop((op, call), (here, 0))
        if known != here:
            raise Violation(f"call {call} of {op} ran under {known} and on rank {rank} under {here}")
        if n_passed + 1 < len(side.shape.members):
            state.ran[op, call] = known, n_passed + 1

    # ---- background threads ------------------------------------------------------------------

    def actions(self, state: State) -> Iterator[Action]:
        """What can happen next without a failure."""
        for rank, its in enumerate(state.ranks):
            yield from self.background(state, rank, its)
            if not self.bounds.reduced:
                yield from self.training(state, rank)
        if state.n_offers < len(self.bounds.offers):
            yield "the daemon offers", self.take_offer, None

    def training(self, state: State, rank: int) -> Iterator[Action]:
        for thread in range(len(self.bounds.programs[rank])):
            if self.can_train(state, rank, thread):
                yield f"rank {rank} calls", lambda after, t=thread: self.train(after, rank, t), rank

    def background(self, state: State, rank: int, its: Rank) -> Iterator[Action]:
        if its.doing == "rest" and rank == 0:
            can_repeat = state.wants_repeat and self.is_quiet(state)
            if state.proposer.offered is not None or can_repeat:
                yield "rank 0 announces", self.announce, 0
        elif its.doing == "rest" and self.sees_change(state, its):
            yield f"rank {rank} looks", lambda after: self.look(after, rank), rank
        elif its.doing == "answer":
            yield from self.answers(state, rank)
        elif its.doing == "write":
            yield f"rank {rank} writes its answer", lambda after: self.write(after, rank), rank
        elif its.doing == "decide" and self.has_answers(state):
            yield "rank 0 decides", self.decide, 0
        elif its.doing == "await" and self.outcome_key(its) in state.store:
            yield f"rank {rank} learns", lambda after: self.learn(after, rank), rank
        elif its.doing == "tidy":
            yield "rank 0 tidies up", self.tidy, 0

    def failures(self, state: State) -> Iterator[Action]:
        """What may go wrong, and clocks that run out."""
        if state.n_failures >= self.bounds.n_failures:
            return
        for rank, its in enumerate(state.ranks):
            if its.doing == "rest" and rank and self.sees_change(state, its):
                yield f"a bell is lost on rank {rank}!", lambda after, r=rank: self.miss(after, r), rank
            if its.doing == "write":
                yield f"rank {rank}'s answer is not written!", lambda after, r=rank: self.go(after, r, "await"), rank
                yield f"rank {rank}'s answer is written, but it cannot know!", self.fails_after(self.write, rank), rank
            if its.doing == "decide":
                if not self.has_answers(state):
                    yield "rank 0 waits no longer!", self.decide, 0
                yield "rank 0's requests fail!", lambda after: self.go(after, 0, "await"), 0
                yield "rank 0 has written, but it cannot know!", self.fails_after(self.settle, 0), 0
            if its.doing == "await":
                yield f"rank {rank} is out of patience!", lambda after, r=rank: self.give_up(after, r), rank
            if rank in self.bounds.closes and its.doing in ("rest", "await", "decide"):
                yield f"rank {rank} closes!", lambda after, r=rank: self.close(after, r), rank

    def fails_after(self, act: Callable[[State, int], None], rank: int) -> Callable[[State], None]:
        def fail(state: State) -> None:
            act(state, rank)
            self.go(state, rank, "await")

        return fail

    def clocks(self, state: State) -> Iterator[Action]:
        """What ends the waiting if nobody does anything else."""
        for rank, its in enumerate(state.ranks):
            if its.doing == "decide":
                yield "rank 0 waits no longer", self.decide, 0
            if its.doing == "await":
                yield f"rank {rank} is out of patience", lambda after, r=rank: self.give_up(after, r), rank

    def is_quiet(self, state: State) -> bool:
        """Nobody but rank 0 is about to do anything: repeats come after seconds, up to a minute."""
        if any(its.doing == "await" for its in state.ranks):
            return False
        return not any(True for rank, its in enumerate(state.ranks) if rank for _ in self.background(state, rank, its))

    def sees_change(self, state: State, its: Rank) -> bool:
        """Bells may be lost, early, late or twice; a look without news does nothing."""
        return "change" in state.store and decode(state.store["change"], PlanChange).number >= its.next

    def take_offer(self, state: State) -> None:
        plan = self.bounds.offers[state.n_offers]
        state.n_offers += 1
        state.proposer.withdraw() if plan is None else state.proposer.offer(plan)

    def announce(self, state: State) -> None:
        its, plan = state.ranks[0], state.proposer.offered
        state.wants_repeat = False
        if plan is not None and plan.epoch in its.plugin.refuses:
            state.proposer.refuse(plan)
            return
        state.n_repeats += plan is None
        change = state.proposer.announce(its.next, plan)
        if change is None:
            return
        its.next += 1
        its.change = change
        state.store["change"] = encode(change)
        state.answered = frozenset()
        its.doing = "answer"

    def look(self, state: State, rank: int) -> None:
        its = state.ranks[rank]
        its.change = decode(state.store["change"], PlanChange)
        its.next, its.doing = its.change.number + 1, "answer"

    def miss(self, state: State, rank: int) -> None:
        state.ranks[rank].next = decode(state.store["change"], PlanChange).number + 1

    def answers(self, state: State, rank: int) -> Iterator[Action]:
        """Reduced: calls matter only by how many of them the promise finds."""
        n_threads = len(self.bounds.programs[rank])
        ahead = [0] * n_threads
        while True:
            yield (
                f"rank {rank} answers after {ahead} calls",
                lambda after, a=tuple(ahead): self.train_and_answer(after, rank, a),
                rank,
            )
            if not self.bounds.reduced:
                return
            for thread in range(n_threads):
                ahead[thread] += 1
                if ahead[thread] <= self.bounds.most_ahead:
                    break
                ahead[thread] = 0
            else:
                return

    def train_and_answer(self, state: State, rank: int, ahead: tuple[int, ...]) -> None:
        for thread, n_calls in enumerate(ahead):
            for _ in range(n_calls):
                if self.can_train(state, rank, thread):
                    self.train(state, rank, thread)
        its = state.ranks[rank]
        assert its.change is not None
        try:
            its.answer = Answer(its.change.number, rank, its.members.answer(its.change))
        except Exception as error:
            its.members.give_up()
            its.answer = Answer(its.change.number, rank, refusal=str(error))
        its.doing = "write" if rank else "decide"

    def write(self, state: State, rank: int) -> None:
        its = state.ranks[rank]
        assert its.answer is not None
        state.store[f"answer/{its.answer.number}/{rank}"] = encode(its.answer)
        its.doing = "await"

    def go(self, state: State, rank: int, doing: str) -> None:
        state.ranks[rank].doing = doing

    def outcome_key(self, its: Rank) -> str:
        assert its.change is not None
        return f"outcome/{its.change.number}"

    def late(self, state: State, number: int) -> frozenset[int]:
        """Ranks that were not there for the last change, and have answered it since."""
        return frozenset(rank for rank in state.absent if f"answer/{number - 1}/{rank}" in state.store)

    def has_answers(self, state: State) -> bool:
        change = state.ranks[0].change
        assert change is not None
        absent = state.absent - self.late(state, change.number)
        expected = (rank for rank in range(1, self.n_ranks) if rank not in absent)
        return all(f"answer/{change.number}/{rank}" in state.store for rank in expected)

    def decide(self, state: State) -> None:
        self.settle(state)
        self.learn(state, 0)

    def settle(self, state: State, rank: int = 0) -> None:
        its = state.ranks[rank]
        assert its.change is not None
        assert its.answer is not None
        number = its.change.number
        for rank in self.late(state, number):
            del state.store[f"answer/{number - 1}/{rank}"]
        found = {rank: state.store.get(f"answer/{number}/{rank}") for rank in range(1, self.n_ranks)}
        state.absent = frozenset(rank for rank, data in found.items() if data is None)
        state.answered = frozenset(found) - state.absent
        answers = [its.answer, *(decode(data, Answer) for data in found.values() if data is not None)]
        outcome = self.outcome_of(its.change, answers, state.left_alone)
        self.check_histories(answers, outcome)
        state.store.setdefault(self.outcome_key(its), encode(outcome))

    def outcome_of(self, change: PlanChange, answers: list[Answer], left_alone: frozenset[str]) -> Outcome:
        return decide(change, answers, left_alone)

    def give_up(self, state: State, rank: int) -> None:
        its = state.ranks[rank]
        assert its.change is not None
        state.store.setdefault(self.outcome_key(its), encode(Outcome(its.change.number, is_given_up=True)))
        self.learn(state, rank)

    def close(self, state: State, rank: int) -> None:
        its = state.ranks[rank]
        if its.doing == "decide":
            self.decide(state)
        elif its.doing == "await":
            self.give_up(state, rank)
        its.doing = "closed"

    def learn(self, state: State, rank: int) -> None:
        its = state.ranks[rank]
        assert its.change is not None
        outcome = decode_outcome(state.store[self.outcome_key(its)], its.change)
        self.carry_out(state, rank, outcome)
        its.answer, its.doing = None, "rest"
        if rank:
            return
        state.proposer.learn(outcome)
        state.left_alone = state.left_alone.union(outcome.left_alone)
        state.wants_repeat = self.asks_again(outcome) and state.n_repeats < self.bounds.n_repeats
        its.doing = "tidy"

    def asks_again(self, outcome: Outcome) -> bool:
        return outcome.is_given_up or any(Why[why].is_temporary for why in outcome.reasons.values())

    def carry_out(self, state: State, rank: int, outcome: Outcome) -> None:
        if not state.ranks[rank].members.carry_out(outcome):
            raise Violation(f"rank {rank} cannot follow {outcome}")

    def tidy(self, state: State) -> None:
        its = state.ranks[0]
        assert its.change is not None
        number = its.change.number
        for rank in state.answered:
            state.store.pop(f"answer/{number}/{rank}", None)
        for old in range(1, number) if len(state.answered) == self.n_ranks - 1 else ():
            state.store.pop(f"outcome/{old}", None)
        its.doing = "rest"

    # ---- what must hold ----------------------------------------------------------------------

    def check_end(self, state: State) -> None:
        """No thread has anything left to do but training."""
        for rank in range(self.n_ranks):
            for thread in range(len(self.bounds.programs[rank])):
                while self.can_train(state, rank, thread):
                    self.train(state, rank, thread)
        for rank, its in enumerate(state.ranks):
            left = [self.next_op(state, rank, thread) for thread in range(len(its.at))]
            if any(left) or any(side and side.promise is not None for side in its.plugin.sides):
                raise Violation(f"rank {rank} waits for ever, {its.doing}, before {left}")
        if self.bounds.n_repeats >= 2 * state.n_failures:
            self.check_adopted(state)

    def check_adopted(self, state: State) -> None:
        plan = state.proposer.plan
        has_ended = {rank for rank, its in enumerate(state.ranks) if its.doing in ("closed", "lost")}
        if state.proposer.highest.epoch > plan.epoch and 0 not in has_ended and not self.bounds.refuses[1]:
            raise Violation(f"epoch {state.proposer.highest.epoch} was never asked for")
        for shape in self.bounds.shapes:
            sides = [self.side(state, rank, shape.name) for rank in shape.members]
            is_named = shape.comm_id or len(shape.members) == self.n_ranks
            refuses = self.bounds.refuses[1] and self.bounds.refuses[0] in shape.members
            if None in sides or has_ended & {0, *shape.members} or not is_named or shape.odd_from or refuses:
                continue
            found = {side.stages[-1][1] if side and side.stages else 0 for side in sides}
            if found != {version(plan.at_last())}:
                raise Violation(f"communicator {shape.name} ends under {found} instead of {version(plan.at_last())}")

    def check_histories(self, answers: list[Answer], outcome: Outcome) -> None:
        seen: dict[tuple[str, int], int] = {}
        for member in (member for answer in answers for member in answer.members):
            for call, hashed in member.checkpoints:
                if seen.setdefault((member.key, call), hashed) != hashed and member.key in outcome.switches:
                    raise Violation(f"communicator {member.key} is not left alone: its ranks differ at call {call}")

    def check_waiting(self, state: State) -> None:
        """Background threads and their clocks alone bring on each call that waits, in a bounded number of actions."""
        alone = state.copied(None)
        for _ in range(12 * self.n_ranks):
            if not any(side and side.promise is not None for its in alone.ranks for side in its.plugin.sides):
                return
            for rank, its in enumerate(alone.ranks):
                done = self.alone(alone, rank, its)
                if done is not None:
                    done(alone)
                    break
            else:
                break
        raise Violation("a call waits for training")

    def alone(self, state: State, rank: int, its: Rank) -> Callable[[State], None] | None:
        first = next(iter(self.background(state, rank, its)), None)
        if first is not None and its.doing != "rest":
            return first[1]
        if its.doing == "decide":
            return self.decide
        return (lambda after: self.give_up(after, rank)) if its.doing == "await" else None


def _no_clock() -> float:
    return 0.0
