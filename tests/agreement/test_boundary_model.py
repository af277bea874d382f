"""The boundary protocol, exhaustively for small jobs, and mutants that the checker must catch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from boundary_model import FIRST, Bounds, Model, State, Violation, explore

from agent.agreement.protocol import Follower, Leader, Pacing, Turn
from store.records import Plan

SMALL = Bounds(n_ranks=2, n_boundaries=4, n_daemon_events=3, expires_after=1, muster=False)
GROWING = Pacing(base=1, limit=4, n_quiet=1)

QUICK = {
    "2 ranks, muster and probation": Bounds(n_boundaries=6, n_daemon_events=1),
    "2 ranks, restart": Bounds(n_boundaries=3, n_daemon_events=0, n_restarts=1),
    "2 ranks, restart under way": Bounds(n_boundaries=2, n_daemon_events=1, n_restarts=1, muster=False),
    "2 ranks, growing interval": replace(SMALL, n_boundaries=7, pacing=GROWING, n_daemon_events=2),
    "3 ranks": Bounds(n_ranks=3, n_boundaries=3, n_daemon_events=1, muster=False),
    "3 ranks, muster": Bounds(n_ranks=3, n_boundaries=3, n_daemon_events=0),
    "out of step": replace(SMALL, n_boundaries=5, skips_boundary=1, n_daemon_events=2),
}
LONG = {
    "2 ranks, expiry": replace(SMALL, n_boundaries=6, expires_after=2),
    "2 ranks": Bounds(n_boundaries=9, n_daemon_events=4),
    "3 ranks": Bounds(n_ranks=3, n_boundaries=6, n_daemon_events=3, muster=False),
    "3 ranks, muster": Bounds(n_ranks=3, n_boundaries=6, n_daemon_events=1),
    "3 ranks, growing interval": Bounds(n_ranks=3, n_boundaries=7, n_daemon_events=2, muster=False, pacing=GROWING),
    "4 ranks": Bounds(n_ranks=4, n_boundaries=4, n_daemon_events=1, muster=False),
    "4 ranks, muster": Bounds(n_ranks=4, n_boundaries=3, n_daemon_events=0),
}


@pytest.mark.parametrize("bounds", QUICK.values(), ids=QUICK)
def test_every_interleaving_agrees(bounds: Bounds) -> None:
    assert explore(Model(bounds)) > 100


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bounds", LONG.values(), ids=LONG)
def test_every_interleaving_agrees_in_larger_jobs(bounds: Bounds) -> None:
    assert explore(Model(bounds)) > 10_000


def test_every_interleaving_agrees_while_daemons_come_die_and_return() -> None:
    """Also that adoption and expiry are reached: else the properties hold because nothing happens."""
    seen: set[int] = set()

    class Watching(Model):
        def cross(self, state: State, index: int) -> None:
            before = state.ranks[index].follower.epoch
            super().cross(state, index)
            seen.add(10 * before + state.ranks[index].follower.epoch)

    explore(Watching(SMALL))
    assert {1, 12, 10} <= seen  # baseline to 1, 1 to 2, 1 back to baseline


class FlipsOnReceipt(Follower):
    def receive(self, turn: Turn) -> None:
        super().receive(turn)
        self.epoch = turn.epoch


class CrossesWithoutWord(Follower):
    @property
    def is_blocked(self) -> bool:
        return False


class IgnoresPromise(Follower):
    def promise(self) -> int:
        super().promise()
        promised, self.due = self.due, None
        assert promised is not None
        return promised

    def receive(self, turn: Turn) -> None:
        self.due = turn.boundary
        self.turn = turn if turn.boundary > self.boundary else None


class ActsEarly(Model):
    """Rank 0 adopts what it has just written, one boundary before the others."""

    def publish(self, state: State, index: int) -> None:
        super().publish(state, index)
        state.ranks[0].follower.epoch = state.leader.plan.epoch


class WritesNoKeep(Model):
    def publish(self, state: State, index: int) -> None:
        super().publish(state, index)
        key, turn = max(
            ((k, t) for k, t in state.store.items() if isinstance(t, Turn)), key=lambda item: item[1].boundary
        )
        if turn.plan is None:
            del state.store[key]


class WaitsForDaemon(Model):
    def can_work(self, state: State, index: int) -> bool:
        if state.ranks[index].background == "publish" and not state.leader.is_daemon_alive:
            return False
        return super().can_work(state, index)


class RewritesTurn(Model):
    """Rank 0 replaces a value that some ranks may have read already."""

    def offer(self, state: State) -> None:
        super().offer(state)
        for key, turn in state.store.items():
            if isinstance(turn, Turn) and key[1] != FIRST and turn.plan is None:
                plan = Plan(epoch=state.n_offers)
                state.store[key] = Turn(turn.boundary, turn.next_boundary, plan.epoch, turn.n_calls, plan)


class ForgetsAttempt(Model):
    """Keys without the attempt: a restarted job reads what the last one left."""

    def key(self, state: State, name: object) -> tuple[object, ...]:
        return (0, name)


class MustersEarly(Model):
    """The first turn lies at rank 0's own promise instead of the furthest."""

    def charter(self, state: State, index: int) -> None:
        key = self.key(state, "promises")
        state.store[key] = (state.ranks[0].follower.due,) * self.bounds.n_ranks
        super().charter(state, index)


class NeverOffers(Leader):
    def news(self) -> Plan | None:
        return None


class Unfrozen(Leader):
    def freeze(self) -> None:
        self.is_frozen = True

    def news(self) -> Plan | None:
        return self.offered


def _with(follower: type[Follower] = Follower, leader: type[Leader] = Leader) -> type[Model]:
    return type("Mutant", (Model,), {"follower_type": follower, "leader_type": leader})


MUSTER = QUICK["2 ranks, muster and probation"]
MUTANTS = {
    "flips on receipt": (_with(FlipsOnReceipt), SMALL, "under epochs"),
    "crosses without the word": (_with(CrossesWithoutWord), SMALL, "under epochs"),
    "ignores its promise": (_with(IgnoresPromise), replace(MUSTER, n_boundaries=8), "under epochs|all ranks wait"),
    "rank 0 one boundary early": (ActsEarly, SMALL, "under epochs"),
    "no keep": (WritesNoKeep, SMALL, "all ranks wait"),
    "waits for the daemon": (WaitsForDaemon, SMALL, "all ranks wait"),
    "rewrites a turn": (RewritesTurn, SMALL, "under epochs"),
    "forgets the attempt": (
        ForgetsAttempt,
        replace(QUICK["2 ranks, restart under way"], n_boundaries=4),
        "under epochs|arrived",
    ),
    "musters early": (MustersEarly, MUSTER, "under epochs|arrived"),
    "never adopts": (_with(leader=NeverOffers), SMALL, "not adopted"),
    "thaws": (_with(leader=Unfrozen), QUICK["out of step"], "out of step"),
}


@pytest.mark.parametrize(("mutant", "bounds", "finding"), MUTANTS.values(), ids=MUTANTS)
def test_the_checker_catches(mutant: type[Model], bounds: Bounds, finding: str) -> None:
    with pytest.raises(Violation, match=finding):
        explore(mutant(bounds))
