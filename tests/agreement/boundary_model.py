"""An explicit-state model of a job under agreement, around the real `Follower` and `Leader`.

Each rank has two threads. The training thread runs steps, reaches boundaries and enqueues one
collective per step; the background thread does one store operation at a time. Any thread may be
arbitrarily slow: every interleaving of their actions is explored, and the daemon offers, dies and
returns whenever it likes. Ranks never wait for each other here (NCCL enqueues asynchronously), which is
harsher than a real job.

Ranks may lose the store, one by one, for good, and the store may forget all that is in it. A rank that waits in
vain gives up after twice the watchdog's timeout. There are no clocks here; what that time stands for is that all
others have done by then whatever they could (`may_give_up`), and that a rank left behind by one that crossed is
ended by the watchdog, with its job.

A restart replaces all ranks, by as many or by another number, and leaves the store as it is; nobody tells the new
ranks which start this is.

No sequence of actions comes back to a state it left (`explore` checks it), so every one ends. A state that must
be reached is therefore reached however threads are scheduled, and it is enough to look at deadlines on the way and
at the states in which nothing can happen any more.

Two things keep states few. Ranks other than 0 are interchangeable: a state is told by how many of them are in which
state of their own. And `Bounds.reduced` leaves out interleavings that change nothing (`persistent_set`). That is
sound for the real classes only, so mutants run without, and tests compare what both find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from boundary_state import Bounds, Rank, State, Violation

from zerotune.agent.agreement.protocol import BoundaryMessage, Follower, Leader
from zerotune.store.records import FirstLook, Plan

FIRST = "first"


Action = tuple[str, Callable[["State"], None], int | None]
"""Its name, what it does, and the only rank that it touches, or None."""


class Model:
    """What may happen next in a state; mutants override one method."""

    follower_type: type[Follower] = Follower
    leader_type: type[Leader] = Leader

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds

    def initial(self) -> State:
        state = State(
            [Rank(self.follower_type()) for _ in range(self.bounds.n_ranks)],
            self.leader_type(self.bounds.pacing),
        )
        state.ranks[0].background = "found"
        if not self.bounds.with_start:
            state.store[("n_incarnations",)] = state.store[("begun", 1)] = 1
            for rank in state.ranks:
                rank.incarnation = 1
                rank.follower.due = 1
                rank.background = "receive"
                rank.has_confirmed = True
            leader = state.ranks[0]
            state.store[self.counted_key(state, leader, "all")] = self.bounds.n_ranks
            state.store[self.counted_key(state, leader, "verdict")] = True
            state.store[self.key(leader, "confirmed")] = self.bounds.n_ranks
            state.leader.is_confirmed = True
            state.store[self.key(leader, FIRST)] = state.leader.first_message([1] * self.bounds.n_ranks)
        return state

    def key(self, rank: Rank, name: object) -> tuple[object, ...]:
        return (rank.incarnation, name)

    def counted_key(self, state: State, rank: Rank, name: str) -> tuple[object, ...]:
        """Keys that starts with different numbers of ranks do not share."""
        return self.key(rank, (name, len(state.ranks)))

    def actions(self, state: State) -> Iterator[Action]:
        """Everything but the daemon and restarts: what must make progress alone."""
        for index, rank in enumerate(state.ranks):
            if rank.follower.is_blocked or rank.follower.is_agreed:
                if rank.follower.is_agreed and rank.background == "idle":
                    yield f"rank {index} crosses", lambda s, i=index: self.cross(s, i), index
            elif rank.n_calls < self.bounds.n_boundaries:
                yield f"rank {index} steps", lambda s, i=index: self.step(s, i), index
            if not rank.is_lost and self.can_work(state, index):
                name = f"rank {index} background {rank.background}"
                yield name, lambda s, i=index: self.work(s, i), index

    def surrenders(self, state: State, is_quiet: bool) -> Iterator[Action]:
        """Ranks whose patience is at its end."""
        for index, rank in enumerate(state.ranks):
            if rank.follower.is_blocked and self.may_give_up(state, index, is_quiet):
                yield f"rank {index} gives up", lambda s, i=index: self.give_up(s, i), index

    def may_give_up(self, state: State, index: int, is_quiet: bool) -> bool:
        """Nothing else can happen any more, and no peer has gone on with the message that this rank lacks."""
        boundary = state.ranks[index].follower.boundary
        return is_quiet and self.is_failed(state) and all(rank.crossed < boundary for rank in state.ranks)

    def is_failed(self, state: State) -> bool:
        return state.n_losses + state.n_wipes > 0

    def can_fail(self, state: State) -> bool:
        return state.n_losses < self.bounds.n_losses or state.n_wipes < self.bounds.n_wipes

    def persistent_set(self, state: State) -> list[Action] | None:
        """Actions that commute with all others; the others may wait until one of these is taken.

        None where there are none. A started rank's own steps and reads are of that kind. In a job start all is, once
        rank 0 has begun: counts only grow to the number of ranks, and what a rank promises depends on its own
        steps alone. Until rank 0 has begun, steps can wait. What the launcher, the network and daemons may do
        besides is added where it does not commute: before a restart the store may be left at any of these writes.
        """
        found = self._commuting(state)
        if found is not None and len(state.restarts) < len(self.bounds.restarts):
            found += self.outside_actions(state)
        return found

    def _commuting(self, state: State) -> list[Action] | None:
        if state.ranks[0].background in ("found", "begin"):
            return None if self.can_fail(state) else [one for one in self.actions(state) if "background" in one[0]]
        for index, rank in enumerate(state.ranks):
            follower, background = rank.follower, rank.background
            step: Action = (f"rank {index} steps", lambda s, i=index: self.step(s, i), index)
            work: Action = (f"rank {index} background {background}", lambda s, i=index: self.work(s, i), index)
            can_step = not (follower.is_blocked or follower.is_agreed) and rank.n_calls < self.bounds.n_boundaries
            can_work = not (rank.is_lost or self.can_fail(state)) and self.can_work(state, index)
            if background in ("receive", "idle", "report", "publish", "write_first"):
                if follower.is_agreed:
                    if index and background == "idle":
                        return [(f"rank {index} crosses", lambda s, i=index: self.cross(s, i), index)]
                elif can_step:
                    return [step]
                if background in ("receive", "write_first") and can_work:
                    return [work]
            elif can_work:
                return [step, work] if can_step and background == "promise" else [work]
        return None

    def outside_actions(self, state: State) -> Iterator[Action]:
        """What the daemon, the network and the launcher may do at any moment."""
        if state.n_daemon_events < self.bounds.n_daemon_events:
            yield "daemon offers", self.offer, 0
            if state.leader.is_daemon_alive:
                yield "daemon dies", self.die, 0
            elif state.n_offers:
                yield "daemon returns", self.come_back, 0
        if state.n_amnesias < self.bounds.n_amnesias and state.leader.highest.epoch:
            yield "a daemon comes that forgot", self.offer_again, 0
        if state.n_losses < self.bounds.n_losses:
            for index, rank in enumerate(state.ranks):
                if not rank.is_lost:
                    yield f"rank {index} loses the store", lambda s, i=index: self.lose(s, i), index
        if state.n_wipes < self.bounds.n_wipes:
            yield "the store forgets", self.wipe, None
        if len(state.restarts) < len(self.bounds.restarts):
            yield "job restarts", self.restart, None

    def is_final(self, state: State) -> bool:
        """The program is through, or it stands still for good after a loss: the watchdog ends the job."""
        return self.is_failed(state) or all(rank.n_calls >= self.bounds.n_boundaries for rank in state.ranks)

    # the training thread

    def step(self, state: State, index: int) -> None:
        rank = state.ranks[index]
        rank.n_calls += 1
        self.enqueue(state, index)
        skips = self.bounds.skips_boundary
        if index == len(state.ranks) - 1 and skips is not None and rank.n_calls == skips + 1:
            return
        rank.follower.arrive()

    def enqueue(self, state: State, index: int) -> None:
        rank = state.ranks[index]
        first = state.epochs.setdefault(rank.n_calls, rank.follower.epoch)
        if first != rank.follower.epoch and self.bounds.skips_boundary is None:
            raise Violation(f"call {rank.n_calls} under epochs {first} and {rank.follower.epoch}")

    def cross(self, state: State, index: int) -> None:
        rank = state.ranks[index]
        crossing = rank.follower.cross(rank.n_calls)
        rank.crossed = crossing.boundary
        if index == 0 and state.deadline and rank.follower.n_agreed >= state.deadline[1]:
            if rank.follower.epoch < state.deadline[0]:
                raise Violation(f"epoch {state.deadline[0]} not adopted by agreed boundary {state.deadline[1]}")
            state.deadline = None
        if index == 0 and state.gone_by is not None and rank.follower.n_agreed >= state.gone_by:
            if rank.follower.epoch:
                raise Violation(f"epoch {rank.follower.epoch} is kept at agreed boundary {state.gone_by}")
            state.gone_by = None
        if index == 0 and self.bounds.look_boundaries:
            self.watch_first_look(state, crossing.boundary)
        rank.n_calls_at_agreed = crossing.n_calls
        rank.must_report = not crossing.is_lockstep
        rank.must_confirm = crossing.is_lockstep and crossing.is_checked and not rank.has_confirmed
        next_step = "receive" if index else "publish"
        rank.background = "report" if rank.must_report or rank.must_confirm else next_step

    def watch_first_look(self, state: State, boundary: int) -> None:
        epoch = state.ranks[0].follower.epoch
        if epoch % 2 == 0:  # what a first look gives way to, or the baseline
            state.look = None
        elif state.look is None or state.look[0] != epoch:
            state.look = epoch, boundary + self.bounds.look_boundaries
        elif boundary >= state.look[1]:
            raise Violation(f"the first look of epoch {epoch} goes on at boundary {boundary}")

    def give_up(self, state: State, index: int) -> None:
        rank = state.ranks[index]
        rank.follower.abandon()
        rank.is_lost = True

    # the background thread: one store operation per action

    def can_work(self, state: State, index: int) -> bool:
        rank = state.ranks[index]
        has = lambda name: self.key(rank, name) in state.store  # noqa: E731
        if rank.background == "look":
            return self.has_begun(state, rank.incarnation + 1) and ("n_incarnations",) in state.store
        if rank.background == "await_":
            has_verdict = self.counted_key(state, rank, "verdict") in state.store
            return has_verdict or self.has_begun(state, rank.incarnation + 1)
        if rank.background == "judge":
            return state.store.get(self.counted_key(state, rank, "all"), 0) >= len(state.ranks)
        if rank.background == "write_first":
            return len(state.store.get(self.key(rank, "promises"), ())) == len(state.ranks)
        if rank.background == "receive":
            first = rank.follower.n_agreed == 0
            return rank.follower.message is None and has(FIRST if first else rank.follower.due)
        return rank.background != "idle"

    def work(self, state: State, index: int) -> None:
        rank = state.ranks[index]
        getattr(self, rank.background)(state, index)

    def has_begun(self, state: State, number: int) -> bool:
        return ("begun", number) in state.store

    def found(self, state: State, index: int) -> None:
        key = ("n_incarnations",)
        state.store[key] = state.ranks[index].incarnation = state.store.get(key, 0) + 1
        state.ranks[index].background = "begin"

    def begin(self, state: State, index: int) -> None:
        state.store[("begun", state.ranks[index].incarnation)] = 1
        state.ranks[index].background = "register"

    def look(self, state: State, index: int) -> None:
        state.ranks[index].incarnation = state.store[("n_incarnations",)]
        state.ranks[index].background = "register"

    def register(self, state: State, index: int) -> None:
        rank = state.ranks[index]
        key = self.counted_key(state, rank, "all")
        state.store[key] = state.store.get(key, 0) + 1
        is_full = state.store[key] > len(state.ranks)
        rank.background = "judge" if index == 0 else "look" if is_full else "await_"

    def judge(self, state: State, index: int) -> None:
        rank = state.ranks[index]
        state.store[self.counted_key(state, rank, "verdict")] = True
        rank.background = "promise"

    def await_(self, state: State, index: int) -> None:
        rank = state.ranks[index]
        rank.background = "look" if self.has_begun(state, rank.incarnation + 1) else "promise"

    def promise(self, state: State, index: int) -> None:
        rank = state.ranks[index]
        if rank.incarnation != state.ranks[0].incarnation:
            raise Violation(f"rank {index} is taken in by the dead start {rank.incarnation}")
        key = self.key(rank, "promises")
        promises = (*state.store.get(key, ()), rank.follower.promise())
        state.store[key] = tuple(sorted(promises))
        rank.background = "receive" if index else "write_first"

    def write_first(self, state: State, index: int) -> None:
        rank = state.ranks[index]
        promises = state.store.pop(self.key(rank, "promises"))
        state.store[self.key(rank, FIRST)] = state.leader.first_message(promises)
        rank.background = "receive"

    def receive(self, state: State, index: int) -> None:
        rank = state.ranks[index]
        name = FIRST if rank.follower.n_agreed == 0 else rank.follower.due
        message = state.store[self.key(rank, name)]
        assert isinstance(message, BoundaryMessage)
        rank.follower.receive(message)
        rank.background = "idle"
        self.forget_read(state, rank, name)

    def forget_read(self, state: State, rank: Rank, name: object) -> None:
        """Keep states small: a value that every rank has moved past is gone, as acknowledged reads do."""
        done = all(
            r.follower.n_agreed > 0 and r.follower.due is not None and r.follower.due > name
            for r in state.ranks
            if isinstance(name, int)
        )
        if isinstance(name, int) and done:
            state.store.pop(self.key(rank, name), None)

    def report(self, state: State, index: int) -> None:
        rank = state.ranks[index]
        if rank.must_report:
            state.store[self.key(rank, "mismatch")] = True
        if rank.must_confirm:
            key = self.key(rank, "confirmed")
            state.store[key] = state.store.get(key, 0) + 1
            rank.has_confirmed = True
        rank.must_report = rank.must_confirm = False
        rank.background = "receive" if index else "publish"

    def publish(self, state: State, index: int) -> None:
        leader, rank = state.leader, state.ranks[index]
        leader.is_confirmed |= state.store.get(self.key(rank, "confirmed")) == len(state.ranks)
        if self.key(rank, "mismatch") in state.store:
            leader.freeze()
        news = leader.news()
        if news is not None and not leader.is_confirmed:
            raise Violation("a plan was published before all ranks confirmed lockstep")
        if news is not None and news.epoch and news.epoch <= leader.highest.epoch and news != leader.highest:
            raise Violation(f"epoch {news.epoch} means two plans")
        before = leader.plan
        message = leader.next_message(rank.n_calls_at_agreed, news)
        if leader.is_frozen and leader.plan != before:
            raise Violation("the plan changed although ranks are out of step")
        state.store[self.key(rank, message.boundary)] = message
        rank.background = "receive"

    # outside

    def offer(self, state: State) -> None:
        state.n_daemon_events += 1
        state.n_offers += 1
        n_boundaries = self.bounds.look_boundaries
        look = FirstLook(n_boundaries, 0, expires_after=self.bounds.expires_after) if n_boundaries else None
        epoch = 2 * state.n_offers - 1 if look else state.n_offers
        plan = Plan(epoch, expires_after=self.bounds.expires_after, first_look=look)
        if not state.leader.offer(plan):
            raise Violation(f"a rising epoch {plan.epoch} was refused")
        state.gone_by = None
        if state.leader.is_confirmed and self.bounds.skips_boundary is None:
            state.deadline = (plan.epoch, state.ranks[0].follower.n_agreed + 2)

    def die(self, state: State) -> None:
        state.n_daemon_events += 1
        state.deadline = None
        state.leader.withdraw()
        if state.leader.is_confirmed and self.bounds.skips_boundary is None:
            n_boundaries = 1 + self.bounds.look_boundaries + self.bounds.expires_after
            state.gone_by = state.ranks[0].follower.n_agreed + n_boundaries

    def come_back(self, state: State) -> None:
        state.n_daemon_events += 1
        state.leader.renew()
        state.gone_by = None

    def offer_again(self, state: State) -> None:
        """Under an epoch that was had, a plan that was not."""
        state.n_amnesias += 1
        state.leader.offer(Plan(state.leader.highest.epoch, expires_after=self.bounds.expires_after + 1))
        state.gone_by = None

    def lose(self, state: State, index: int) -> None:
        state.n_losses += 1
        state.ranks[index].is_lost = True

    def wipe(self, state: State) -> None:
        state.n_wipes += 1
        state.store.clear()

    def restart(self, state: State) -> None:
        """All processes are replaced; the store, with what the last start left in it, is not.

        Of that all is left out which only ranks read that have promised: `promise` checks that none does.
        """
        n_ranks = self.bounds.restarts[len(state.restarts)]
        state.restarts = (*state.restarts, n_ranks)
        state.store = {
            key: value
            for key, value in state.store.items()
            if key[0] in ("n_incarnations", "begun") or isinstance(key[1], tuple)
        }
        state.ranks = [Rank(self.follower_type()) for _ in range(n_ranks)]
        state.ranks[0].background = "found"
        state.leader = self.leader_type(self.bounds.pacing)
        state.epochs = {}
        state.deadline = state.look = state.gone_by = None
        state.n_offers = 0
