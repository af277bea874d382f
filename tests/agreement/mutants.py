"""Protocols that are wrong in one place, and the smallest job in which it shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from change_model import Bounds, Model, State
from nccl_side import row
from plugin_model import Communicator, PluginModel, Shape

from zerotune.agent.agreement.members import Members
from zerotune.agent.agreement.protocol import Answer, Outcome, PlanChange, Proposer, Switch, decide
from zerotune.store.records import NextStage, Plan

TRIAL = Plan(1, then=(NextStage(n_steps=1, n_rows=0),))
NEXT = Plan(3)
PROGRAM = (tuple("wwwww"),)
PAIR = Bounds((Shape("w", (0, 1), 1),), (PROGRAM, PROGRAM), (TRIAL,), n_repeats=0, reduced=False)
TWICE = replace(PAIR, offers=(TRIAL, NEXT), reduced=True)
FAILING = replace(PAIR, n_failures=1, reduced=True)
FAILING_TWICE = replace(TWICE, n_failures=1)
ASKED_AGAIN = replace(FAILING, n_repeats=2)
NAMELESS = Bounds(
    (Shape("a", (0, 1), 0), Shape("b", (2, 3), 0)),
    tuple((tuple(4 * name),) for name in "aabb"),
    (Plan(1),),
    most_ahead=0,
    n_failures=2,
    n_repeats=0,
)
ODD = Bounds((Shape("w", (0, 1), 1, odd_from=10),), ((tuple("wwwww"),),) * 2, (Plan(1), Plan(2)), n_repeats=0)
ODD_OF_THREE = replace(
    ODD, shapes=(Shape("w", (0, 1, 2), 1, odd_from=9),), programs=((tuple("wwww"),),) * 3, most_ahead=1, n_failures=1
)


class NoPromise(PluginModel):
    """Calls do not wait."""

    def promise(self, owner: int, lead_calls: int) -> int:
        promise = super().promise(owner, lead_calls)
        side = self.sides[owner]
        assert side is not None
        side.promise = 10**9
        return promise

    def commit(self, owner: int, from_calls: tuple[int, ...], cycle: bytes = b"") -> bool:
        side = self.sides[owner]
        assert side is not None
        side.promise = from_calls[0]
        return super().commit(owner, from_calls, cycle)


class PromisesThePast(PluginModel):
    """The promise is compared with calls that are counted afterwards: the one that is under way passes."""

    def promise(self, owner: int, lead_calls: int) -> int:
        promise = super().promise(owner, lead_calls)
        side = self.sides[owner]
        assert side is not None
        side.promise = promise
        return promise - 1


class ForgetsThePast(PluginModel):
    """What was in force before the new stages is dropped with the commit."""

    def commit(self, owner: int, from_calls: tuple[int, ...], cycle: bytes = b"") -> bool:
        side = self.sides[owner]
        assert side is not None
        side.stages = ()
        return super().commit(owner, from_calls, cycle)


class SwitchesAtOnce(PluginModel):
    """Each rank switches where it is when it learns the outcome."""

    def commit(self, owner: int, from_calls: tuple[int, ...], cycle: bytes = b"") -> bool:
        side = self.sides[owner]
        assert side is not None
        later = side.n_calls + 1 - from_calls[0]
        side.promise = side.n_calls + 1
        return super().commit(owner, tuple(call + later for call in from_calls), cycle)


class OwnStages(PluginModel):
    """How long a stage lasts is counted in one's own steps."""

    def commit(self, owner: int, from_calls: tuple[int, ...], cycle: bytes = b"") -> bool:
        side = self.sides[owner]
        assert side is not None
        own = tuple(from_calls[0] + i * side.calls_per_step for i in range(len(from_calls)))
        return super().commit(owner, own, cycle)


class NeverReleases(PluginModel):
    """A change that was given up leaves its promises."""

    def release(self, owner: int) -> None:
        return


def with_plugin(plugin: type[PluginModel]) -> type[Model]:
    return type(plugin.__name__, (Model,), {"plugin_type": plugin, "__doc__": plugin.__doc__})


class SwitchesOnReceipt(Model):
    """Who sees the change follows it without asking anybody."""

    def look(self, state: State, rank: int) -> None:
        super().look(state, rank)
        its = state.ranks[rank]
        assert its.change is not None
        for side in its.plugin.sides:
            if side is not None:
                side.stages = ((side.n_calls + 1, its.change.plan.epoch),)


class CountsOnTheAbsent(Model):
    """Commits what not all members of a communicator answered."""

    def outcome_of(self, change: PlanChange, answers: list[Answer], left_alone: frozenset[str]) -> Outcome:
        alone = [
            replace_members(each, [(m, {"n_ranks": sum(m.key in keys_of(a) for a in answers)}) for m in each.members])
            for each in answers
        ]
        return decide(change, alone, left_alone)


def keys_of(answer: Answer) -> set[str]:
    return {member.key for member in answer.members}


def replace_members(answer: Answer, changes: list[tuple[Any, dict[str, Any]]]) -> Answer:
    members = []
    for member, changed in changes:
        members.append(msgspec.structs.replace(member, **changed))
    return Answer(answer.number, answer.rank, tuple(members), answer.refusal)


class BelowThePromise(Model):
    """Switches at the nearest promise."""

    def outcome_of(self, change: PlanChange, answers: list[Answer], left_alone: frozenset[str]) -> Outcome:
        outcome = decide(change, answers, left_alone)
        nearest = {
            m.key: min(n.promise for a in answers for n in a.members if n.key == m.key) for m in answers[0].members
        }
        for key, switch in outcome.switches.items():
            later = nearest[key] - switch.from_calls[0]
            outcome.switches[key] = Switch(tuple(call + later for call in switch.from_calls))
        return outcome


class WaitsForTraining(Model):
    """A member answers at a step's end, and nobody's patience ends."""

    def background(self, state: State, rank: int, its: Any) -> Any:
        for action in super().background(state, rank, its):
            sides = [side for side in its.plugin.sides if side is not None]
            if its.doing != "answer" or all(side.n_calls % side.calls_per_step == 0 for side in sides):
                yield action

    def alone(self, state: State, rank: int, its: Any) -> Any:
        first = next(iter(self.background(state, rank, its)), None)
        return first[1] if first is not None and its.doing != "rest" else None


class OwnPhase(Model):
    """What a call runs under depends on where in its own step a rank is."""

    def ran_under(self, side: Communicator, stage: int) -> Any:
        return stage, bool(stage) and side.n_calls % side.calls_per_step == 0


class OverwritesTheOutcome(Model):
    """Rank 0 writes the outcome whatever is there."""

    def decide(self, state: State) -> None:
        state.store.pop(self.outcome_key(state.ranks[0]), None)
        super().decide(state)


class WritesOverTheOutcome(Model):
    """Who is out of patience writes that nothing changes, whatever is there."""

    def give_up(self, state: State, rank: int) -> None:
        state.store.pop(self.outcome_key(state.ranks[rank]), None)
        super().give_up(state, rank)


class GivesUpInSilence(Model):
    """Who is out of patience lets its calls pass and tells nobody."""

    def give_up(self, state: State, rank: int) -> None:
        its = state.ranks[rank]
        assert its.change is not None
        self.carry_out(state, rank, Outcome(its.change.number))
        its.doing = "tidy" if rank == 0 else "rest"


class TakesTheAbsentForReaders(Model):
    """An outcome is deleted once rank 0 has gone on, as if all had answered a later change."""

    def tidy(self, state: State) -> None:
        state.answered = frozenset(range(1, self.n_ranks))
        super().tidy(state)


class ForgetsItsPromise(Model):
    """A request that failed ends the change for the rank that sent it."""

    def go(self, state: State, rank: int, doing: str) -> None:
        state.ranks[rank].members.give_up()
        state.ranks[rank].doing = "lost"


class EndsWithPromises(Model):
    """The thread ends when a request fails."""

    def go(self, state: State, rank: int, doing: str) -> None:
        state.ranks[rank].doing = "lost"


class ClosesWithPromises(Model):
    """Closing does not wait for the outcome."""

    def close(self, state: State, rank: int) -> None:
        state.ranks[rank].doing = "closed"


class ClosesInSilence(Model):
    """Closing lets calls pass without asking what was decided."""

    def close(self, state: State, rank: int) -> None:
        state.ranks[rank].members.give_up()
        state.ranks[rank].doing = "closed"


class DeletesTooEarly(Model):
    """Outcomes are deleted with the answers."""

    def tidy(self, state: State) -> None:
        change = state.ranks[0].change
        assert change is not None
        super().tidy(state)
        state.store.pop(f"outcome/{change.number}", None)


class AbandonsTheAbsent(Model):
    """Nobody waits again for who was missing once."""

    def late(self, state: State, number: int) -> frozenset[int]:
        return frozenset()


class NeverAsksAgain(Model):
    """What was given up is not asked for again."""

    def asks_again(self, outcome: Outcome) -> bool:
        return False


class CountsOldAnswers(Model):
    """An answer to an earlier change counts for this one."""

    def has_answers(self, state: State) -> bool:
        return True

    def decide(self, state: State) -> None:
        change = state.ranks[0].change
        assert change is not None
        for rank in range(1, self.n_ranks):
            old = state.store.get(f"old/{rank}")
            if old is not None and f"answer/{change.number}/{rank}" not in state.store:
                state.store[f"answer/{change.number}/{rank}"] = old
        super().decide(state)

    def write(self, state: State, rank: int) -> None:
        super().write(state, rank)
        its = state.ranks[rank]
        assert its.answer is not None
        state.store[f"old/{rank}"] = state.store[f"answer/{its.answer.number}/{rank}"]

    def outcome_of(self, change: PlanChange, answers: list[Answer], left_alone: frozenset[str]) -> Outcome:
        return decide(change, [Answer(change.number, each.rank, each.members) for each in answers], left_alone)


class SkipsOutcomes(Model):
    """A newer change ends the waiting for an older one's outcome."""

    def background(self, state: State, rank: int, its: Any) -> Any:
        if its.doing == "await" and rank and self.sees_change(state, its):
            yield f"rank {rank} goes on", lambda after: self.go_on(after, rank), rank
        yield from super().background(state, rank, its)

    def go_on(self, state: State, rank: int) -> None:
        state.ranks[rank].members.give_up()
        self.look(state, rank)


class IgnoresHistories(Model):
    """Compares nothing that ranks have issued."""

    def outcome_of(self, change: PlanChange, answers: list[Answer], left_alone: frozenset[str]) -> Outcome:
        blind = [replace_members(each, [(m, {"checkpoints": ((1, 1),)}) for m in each.members]) for each in answers]
        return decide(change, blind)


class LeavesAPartAlone(Model):
    """Ranks that differ go back to NCCL's own choice though others of the communicator did not answer."""

    def outcome_of(self, change: PlanChange, answers: list[Answer], left_alone: frozenset[str]) -> Outcome:
        outcome = decide(change, answers, left_alone)
        for key, why in outcome.reasons.items():
            members = [member for each in answers for member in each.members if member.key == key]
            if why == "histories_differ" and all(member.promise for member in members):
                outcome.left_alone.setdefault(key, max(member.promise for member in members))
        return outcome


class TrustsShapes(Members):
    """Takes a shape for a name."""

    def answer(self, change: PlanChange) -> Any:
        self._world_size = 2
        return super().answer(change)


class Nameless(Model):
    """Communicators of one shape are taken for one."""

    members_type = TrustsShapes


class FallingEpochs(Proposer):
    """Takes a plan whose epoch lies within those of the one before."""

    def offer(self, plan: Plan) -> bool:
        if plan.epoch <= self.highest.epoch:
            return False
        self.offered = self.highest = plan
        return True


class Falling(Model):
    """Epochs of a plan's stages are given a second meaning."""

    proposer_type = FallingEpochs


class ForgetsWhatItOffered(Proposer):
    """What could not be announced at once is lost."""

    def announce(self, number: int, plan: Plan | None) -> PlanChange | None:
        change = super().announce(number, plan)
        if plan is not None and number > 1:
            self.plan = Plan(epoch=0)
            return None
        return change


class Forgetful(Model):
    """A second offer is never asked for."""

    proposer_type = ForgetsWhatItOffered


class ObeysItself(Model):
    """Rank 0 obeys what it wanted to write instead of what is written."""

    def decide(self, state: State) -> None:
        key = self.outcome_key(state.ranks[0])
        written = state.store.pop(key, None)
        super().decide(state)
        state.store[key] = written or state.store[key]


MUTANTS: list[tuple[type[Model], Bounds]] = [
    (with_plugin(NoPromise), PAIR),
    (with_plugin(PromisesThePast), PAIR),
    (with_plugin(ForgetsThePast), replace(TWICE, lead=1, offers=(Plan(1), Plan(2)))),
    (with_plugin(SwitchesAtOnce), PAIR),
    (with_plugin(OwnStages), PAIR),
    (with_plugin(NeverReleases), FAILING),
    (SwitchesOnReceipt, PAIR),
    (CountsOnTheAbsent, FAILING),
    (BelowThePromise, replace(PAIR, reduced=True)),
    (WaitsForTraining, PAIR),
    (OwnPhase, replace(PAIR, programs=((tuple("wwwwwwww"),),) * 2, reduced=True)),
    (OverwritesTheOutcome, FAILING),
    (WritesOverTheOutcome, FAILING),
    (GivesUpInSilence, FAILING),
    (TakesTheAbsentForReaders, FAILING_TWICE),
    (ForgetsItsPromise, FAILING),
    (EndsWithPromises, FAILING),
    (ClosesWithPromises, replace(FAILING, closes=(0, 1))),
    (ClosesInSilence, replace(FAILING, closes=(1,))),
    (DeletesTooEarly, PAIR),
    (AbandonsTheAbsent, ASKED_AGAIN),
    (NeverAsksAgain, ASKED_AGAIN),
    (CountsOldAnswers, replace(FAILING_TWICE, n_failures=0)),
    (SkipsOutcomes, replace(TWICE, lead=0)),
    (IgnoresHistories, ODD),
    (LeavesAPartAlone, ODD_OF_THREE),
    (Nameless, NAMELESS),
    (Falling, replace(TWICE, offers=(TRIAL, Plan(2, (row(2, 1),))))),
    (Forgetful, TWICE),
    (ObeysItself, FAILING),
]
