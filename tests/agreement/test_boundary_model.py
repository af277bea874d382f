"""The boundary protocol, exhaustively for small jobs, and mutants that the checker must catch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from boundary_model import FIRST, Model
from boundary_state import Bounds, Rank, State, Violation
from exploration import explore

from zerotune.agent.agreement.protocol import BoundaryMessage, Follower, Leader, Pacing
from zerotune.store.records import Plan

SMALL = Bounds(n_ranks=2, n_boundaries=4, n_daemon_events=3, expires_after=1, with_start=False)
FOUR = Bounds(n_ranks=4, with_start=False, reduced=True)
EIGHT = replace(FOUR, n_ranks=8)
GROWING = Pacing(base=1, limit=4, n_quiet=1)

QUICK = {
    "2 ranks, job start and probation": Bounds(n_boundaries=6, n_daemon_events=1, reduced=True),
    "2 ranks, restart": Bounds(n_boundaries=2, n_daemon_events=0, restarts=(2,)),
    "2 ranks, restart under way": Bounds(n_boundaries=2, n_daemon_events=1, restarts=(2,), with_start=False),
    "2 ranks, growing interval": replace(SMALL, n_boundaries=7, pacing=GROWING, n_daemon_events=2, reduced=True),
    "2 ranks, lost": replace(SMALL, n_boundaries=3, n_losses=2, n_daemon_events=2),
    "3 ranks": Bounds(n_ranks=3, n_boundaries=3, n_daemon_events=1, with_start=False),
    "out of step": replace(SMALL, n_boundaries=4, skips_boundary=1, n_daemon_events=2),
    "3 ranks, job start": Bounds(n_ranks=3, n_boundaries=4, n_daemon_events=1, reduced=True),
    "4 ranks": Bounds(n_ranks=4, n_boundaries=6, n_daemon_events=3, with_start=False, reduced=True),
    "4 ranks, lost": Bounds(n_ranks=4, n_boundaries=3, n_daemon_events=1, n_losses=1, with_start=False, reduced=True),
    "2 ranks, first looks": replace(SMALL, n_boundaries=6, look_boundaries=2, reduced=True),
    "3 ranks, first looks": replace(SMALL, n_ranks=3, n_boundaries=5, look_boundaries=1, reduced=True),
    "2 to 3 ranks": Bounds(n_boundaries=2, n_daemon_events=0, restarts=(3,), reduced=True),
    "2 ranks, the store forgets": replace(SMALL, n_boundaries=3, n_wipes=1, n_daemon_events=1),
    "2 ranks, the store forgets the start": Bounds(n_boundaries=2, n_daemon_events=0, n_wipes=1, restarts=(2,)),
    "2 ranks, a forgetful daemon": replace(SMALL, n_boundaries=3, n_daemon_events=2, n_amnesias=1),
    "8 ranks": replace(EIGHT, n_boundaries=6, n_daemon_events=3),
    "8 ranks, job start and probation": Bounds(n_ranks=8, n_boundaries=4, n_daemon_events=0, reduced=True),
    "8 to 6 ranks": Bounds(n_ranks=8, n_boundaries=1, n_daemon_events=0, restarts=(6,), reduced=True),
    "6 to 8 ranks, under way": replace(EIGHT, n_ranks=6, n_boundaries=1, n_daemon_events=1, restarts=(8,)),
    "8 ranks, lost": replace(EIGHT, n_boundaries=2, n_daemon_events=0, n_losses=1),
    "8 ranks, the store forgets": replace(EIGHT, n_boundaries=2, n_daemon_events=1, n_wipes=1),
    "8 ranks, first looks": replace(EIGHT, n_boundaries=5, n_daemon_events=3, look_boundaries=1),
    "8 ranks, a forgetful daemon": replace(EIGHT, n_boundaries=5, n_daemon_events=2, n_amnesias=1),
    "8 ranks, growing interval": replace(EIGHT, n_boundaries=7, n_daemon_events=2, pacing=GROWING),
    "8 ranks, out of step": replace(EIGHT, n_boundaries=4, n_daemon_events=1, skips_boundary=1),
}
LONG = {
    "2 ranks, growing interval": replace(SMALL, n_boundaries=7, pacing=GROWING, n_daemon_events=2),
    "2 ranks, job start and probation": Bounds(n_boundaries=7, n_daemon_events=1),
    "2 ranks, expiry": replace(SMALL, n_boundaries=6, expires_after=2),
    "2 ranks": Bounds(n_boundaries=8, n_daemon_events=3),
    "2 ranks, restart": Bounds(n_boundaries=3, n_daemon_events=1, restarts=(2,)),
    "3 ranks": Bounds(n_ranks=3, n_boundaries=5, n_daemon_events=2, with_start=False),
    "3 ranks, growing interval": Bounds(n_ranks=3, n_boundaries=6, n_daemon_events=2, with_start=False, pacing=GROWING),
    "3 ranks, lost": Bounds(n_ranks=3, n_boundaries=4, n_daemon_events=2, n_losses=2, with_start=False, reduced=True),
    "4 ranks": replace(FOUR, n_boundaries=7, n_daemon_events=4),
    "4 ranks, lost": Bounds(n_ranks=4, n_boundaries=3, n_daemon_events=1, n_losses=2, with_start=False, reduced=True),
    "4 ranks, growing interval": replace(FOUR, n_boundaries=12, n_daemon_events=4, pacing=GROWING),
    "4 ranks, out of step": replace(FOUR, n_boundaries=6, n_daemon_events=3, skips_boundary=1),
    "4 ranks, first looks": replace(FOUR, n_boundaries=8, n_daemon_events=4, look_boundaries=2, expires_after=3),
    "2 ranks, first looks, growing interval": replace(
        SMALL, n_boundaries=8, n_daemon_events=2, pacing=GROWING, look_boundaries=2, expires_after=4
    ),
    "4 ranks, to 3, to 4": Bounds(n_ranks=4, n_boundaries=2, n_daemon_events=0, restarts=(3, 4), reduced=True),
    "8 ranks": replace(EIGHT, n_boundaries=9, n_daemon_events=4),
    "8 ranks, job start and probation": Bounds(n_ranks=8, n_boundaries=5, n_daemon_events=1, reduced=True),
    "8 ranks, restart": Bounds(n_ranks=8, n_boundaries=3, n_daemon_events=0, restarts=(8,), reduced=True),
    "8 to 6 ranks": Bounds(n_ranks=8, n_boundaries=3, n_daemon_events=1, restarts=(6,), reduced=True),
    "6 to 8 ranks": Bounds(n_ranks=6, n_boundaries=2, n_daemon_events=1, restarts=(8,), reduced=True),
    "8 ranks, lost": replace(EIGHT, n_boundaries=3, n_daemon_events=1, n_losses=1),
    "8 ranks, two lost": replace(EIGHT, n_boundaries=2, n_daemon_events=1, n_losses=2),
    "8 ranks, the store forgets": replace(EIGHT, n_boundaries=4, n_daemon_events=1, n_wipes=1),
    "8 ranks, first looks": replace(EIGHT, n_boundaries=8, n_daemon_events=4, look_boundaries=2, expires_after=3),
    "8 ranks, a forgetful daemon": replace(EIGHT, n_boundaries=7, n_daemon_events=4, n_amnesias=2),
    "8 ranks, growing interval": replace(EIGHT, n_boundaries=12, n_daemon_events=3, pacing=GROWING),
}


@pytest.mark.parametrize("bounds", QUICK.values(), ids=QUICK)
def test_every_interleaving_agrees(bounds: Bounds) -> None:
    assert explore(Model(bounds)) > 100


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bounds", LONG.values(), ids=LONG)
def test_every_interleaving_agrees_in_larger_jobs(bounds: Bounds) -> None:
    assert explore(Model(bounds)) > 10_000


REDUCTIONS = {
    **{name: replace(QUICK[name], n_daemon_events=1) for name in ("2 ranks, growing interval", "out of step")},
    "2 ranks, lost": replace(QUICK["2 ranks, lost"], n_daemon_events=1),
    "3 ranks, job start": Bounds(n_ranks=3, n_boundaries=3, n_daemon_events=0),
    "2 to 3 ranks": Bounds(n_boundaries=1, n_daemon_events=0, restarts=(3,)),
    "2 ranks, restart": Bounds(n_boundaries=2, n_daemon_events=1, restarts=(2,)),
}


@pytest.mark.parametrize("bounds", REDUCTIONS.values(), ids=REDUCTIONS)
def test_interleavings_left_out_change_nothing(bounds: Bounds) -> None:
    def outcomes(bounds: Bounds) -> set[object]:
        found: set[object] = set()

        class Watching(Model):
            def is_final(self, state: State) -> bool:
                counts = tuple(sorted(rank.n_calls for rank in state.ranks))
                found.add((tuple(sorted(state.epochs.items())), counts, frozenset(state.store.items())))
                return super().is_final(state)

            def restart(self, state: State) -> None:
                super().restart(state)
                found.add((state.n_daemon_events, frozenset(state.store.items())))

        explore(Watching(bounds))
        return found

    # Only states in which nothing can happen are asked whether they are final.
    assert outcomes(replace(bounds, reduced=False)) == outcomes(replace(bounds, reduced=True))


def test_every_interleaving_agrees_while_daemons_come_die_and_return() -> None:
    """Also that adoption and expiry are reached: else the properties hold because nothing happens."""
    seen: set[int] = set()

    class Watching(Model):
        def cross(self, state: State, index: int) -> None:
            before = state.ranks[index].follower.epoch
            super().cross(state, index)
            seen.add(10 * before + state.ranks[index].follower.epoch)

    explore(Watching(replace(SMALL, reduced=True)))
    assert {1, 12, 10} <= seen  # baseline to 1, 1 to 2, 1 back to baseline


def test_first_looks_end_by_themselves_and_give_way_to_newer_plans() -> None:
    seen: set[tuple[int, int]] = set()

    class Watching(Model):
        def cross(self, state: State, index: int) -> None:
            before = state.ranks[index].follower.epoch
            super().cross(state, index)
            seen.add((before, state.ranks[index].follower.epoch))

    explore(Watching(QUICK["2 ranks, first looks"]))
    assert {(0, 1), (1, 2), (1, 3), (2, 3), (2, 0)} <= seen  # begun, ended, overtaken, begun again, expired


class FlipsOnReceipt(Follower):
    def receive(self, message: BoundaryMessage) -> None:
        super().receive(message)
        self.epoch = message.epoch


class CrossesWithoutMessage(Follower):
    @property
    def is_blocked(self) -> bool:
        return False


class IgnoresPromise(Follower):
    def promise(self) -> int:
        super().promise()
        promised, self.due = self.due, None
        assert promised is not None
        return promised

    def receive(self, message: BoundaryMessage) -> None:
        self.due = message.boundary
        self.message = message if message.boundary > self.boundary else None


class ActsEarly(Model):
    """Rank 0 adopts what it has just written, one boundary before the others."""

    def publish(self, state: State, index: int) -> None:
        super().publish(state, index)
        state.ranks[0].follower.epoch = state.leader.plan.epoch


class WritesNoKeep(Model):
    def publish(self, state: State, index: int) -> None:
        super().publish(state, index)
        key, message = max(
            ((k, t) for k, t in state.store.items() if isinstance(t, BoundaryMessage)),
            key=lambda item: item[1].boundary,
        )
        if message.plan is None:
            del state.store[key]


class WaitsForDaemon(Model):
    def can_work(self, state: State, index: int) -> bool:
        if state.ranks[index].background == "publish" and not state.leader.is_daemon_alive:
            return False
        return super().can_work(state, index)


class RewritesMessage(Model):
    """Rank 0 replaces a value that some ranks may have read already."""

    def offer(self, state: State) -> None:
        super().offer(state)
        for key, message in state.store.items():
            if isinstance(message, BoundaryMessage) and key[1] != FIRST and message.plan is None:
                plan = Plan(epoch=state.n_offers)
                state.store[key] = BoundaryMessage(
                    message.boundary, message.next_boundary, plan.epoch, message.n_calls, plan
                )


class TakesTheOldStart(Model):
    """A rank that comes to a count that is full already takes it for its own."""

    def register(self, state: State, index: int) -> None:
        super().register(state, index)
        if index:
            state.ranks[index].background = "await_"

    def await_(self, state: State, index: int) -> None:
        state.ranks[index].background = "promise"


class LastToComeJudges(Model):
    """Not rank 0 but whoever completes the count says that all are here: dead ranks count."""

    def register(self, state: State, index: int) -> None:
        super().register(state, index)
        rank = state.ranks[index]
        if state.store[self.counted_key(state, rank, "all")] == len(state.ranks):
            state.store[self.counted_key(state, rank, "verdict")] = True

    def await_(self, state: State, index: int) -> None:
        state.ranks[index].background = "promise"


class CountsAllStartsAlike(Model):
    """Starts with different numbers of ranks share their counts."""

    def counted_key(self, state: State, rank: Rank, name: str) -> tuple[object, ...]:
        return self.key(rank, (name,))


class ReportsForEver(Model):
    """A rank out of step says so again and again instead of going on."""

    def report(self, state: State, index: int) -> None:
        must_report = state.ranks[index].must_report
        super().report(state, index)
        if must_report:
            state.ranks[index].must_report, state.ranks[index].background = True, "report"


class GivesUpAtOnce(Model):
    """A rank without the store does not wait until its peers must have come to the boundary."""

    def may_give_up(self, state: State, index: int, is_quiet: bool) -> bool:
        return state.ranks[index].is_lost


class LeavesItsPeers(Model):
    """A rank whose patience is at its end goes on although a peer has crossed with the message."""

    def may_give_up(self, state: State, index: int, is_quiet: bool) -> bool:
        return is_quiet and state.n_losses > 0


class StartsEarly(Model):
    """The first agreed boundary lies at rank 0's own promise instead of the furthest."""

    def write_first(self, state: State, index: int) -> None:
        key = self.key(state.ranks[0], "promises")
        state.store[key] = (state.ranks[0].follower.due,) * self.bounds.n_ranks
        super().write_first(state, index)


class NeverOffers(Leader):
    def news(self) -> Plan | None:
        return None


class LooksOn(Leader):
    """Waits for the daemon to end a first look."""

    def news(self) -> Plan | None:
        return None if self.offered is None and self.plan.first_look is not None else super().news()


class AdoptsLate(Leader):
    """News is written one agreed boundary later than it could be."""

    def news(self) -> Plan | None:
        news = super().news()
        return news if self.n_quiet_boundaries else None


class TakesOldEpochs(Leader):
    """Whatever a daemon offers is taken."""

    def offer(self, plan: Plan) -> bool:
        self.is_daemon_alive = True
        self.offered = plan
        return True


class NeverExpires(Leader):
    """The plan of a dead daemon stays."""

    def news(self) -> Plan | None:
        news = super().news()
        return None if news is not None and news.epoch == 0 else news


class ExpiresLate(Leader):
    """An agreed boundary without the daemon is not counted."""

    def withdraw(self) -> None:
        super().withdraw()
        self.renewed_at = self.next_boundary + 1


class Unfrozen(Leader):
    def freeze(self) -> None:
        self.is_frozen = True

    def news(self) -> Plan | None:
        return self.offered


def _with(follower: type[Follower] = Follower, leader: type[Leader] = Leader) -> type[Model]:
    return type("Mutant", (Model,), {"follower_type": follower, "leader_type": leader})


JOB_START = replace(QUICK["2 ranks, job start and probation"], reduced=False)
RESTARTED = replace(QUICK["2 ranks, restart under way"], n_boundaries=3)
MUTANTS = {
    "flips on receipt": (_with(FlipsOnReceipt), SMALL, "under epochs"),
    "crosses without the message": (_with(CrossesWithoutMessage), SMALL, "under epochs"),
    "ignores its promise": (_with(IgnoresPromise), replace(JOB_START, n_boundaries=8), "under epochs|all ranks wait"),
    "rank 0 one boundary early": (ActsEarly, SMALL, "under epochs"),
    "no keep": (WritesNoKeep, SMALL, "all ranks wait"),
    "waits for the daemon": (WaitsForDaemon, SMALL, "all ranks wait"),
    "rewrites a message": (RewritesMessage, SMALL, "under epochs"),
    "takes the old start": (TakesTheOldStart, RESTARTED, "dead start"),
    "last to come judges": (LastToComeJudges, replace(QUICK["2 ranks, restart"], n_boundaries=4), "dead start"),
    "gives up at once": (GivesUpAtOnce, QUICK["2 ranks, lost"], "under epochs"),
    "leaves its peers": (LeavesItsPeers, QUICK["2 ranks, lost"], "under epochs"),
    "adopts late": (_with(leader=AdoptsLate), SMALL, "not adopted"),
    "starts early": (StartsEarly, JOB_START, "under epochs|arrived"),
    "looks on": (_with(leader=LooksOn), replace(QUICK["2 ranks, first looks"], reduced=False), "goes on"),
    "never adopts": (_with(leader=NeverOffers), SMALL, "not adopted"),
    "counts all starts alike": (CountsAllStartsAlike, QUICK["2 to 3 ranks"], "dead start"),
    "reports for ever": (ReportsForEver, QUICK["out of step"], "circle"),
    "takes old epochs": (_with(leader=TakesOldEpochs), QUICK["2 ranks, a forgetful daemon"], "two plans"),
    "never expires": (_with(leader=NeverExpires), SMALL, "is kept"),
    "expires late": (_with(leader=ExpiresLate), replace(SMALL, n_boundaries=5), "is kept"),
    "thaws": (_with(leader=Unfrozen), QUICK["out of step"], "out of step"),
}


@pytest.mark.parametrize(("mutant", "bounds", "finding"), MUTANTS.values(), ids=MUTANTS)
def test_the_checker_catches(mutant: type[Model], bounds: Bounds, finding: str) -> None:
    with pytest.raises(Violation, match=finding):
        explore(mutant(bounds))
