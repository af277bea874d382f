"""`Agreement`: the thread that carries the protocol between the job's store and the plugin.

In steady state it sleeps and sends the store no request. A rank reads the store when its daemon notifies it of a
change, and while it takes part in a change. While a plan is in force without a daemon, it reads the store seldom.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist

from ...store.errors import WireError
from ...store.records import Plan, PlanRow
from ...store.wire import WIRE_VERSION
from ..nccl.library import Plugin
from . import job_start
from .exchange import Closed, Exchange
from .members import Members
from .news import DaemonState, NewCommunicator, News, Notified, Offered, PollFor, Withdrawn
from .protocol import Answer, Outcome, PlanChange, Proposer, Why, decide, decode, decode_outcome, encode, framed, frames

logger = logging.getLogger("zerotune.agreement")

DECIDE_S: Final = 2.0
"""How long rank 0 waits for answers; communicators of ranks that did not answer keep their plan."""
PATIENCE_S: Final = 5.0
"""How long a rank waits for an outcome before it writes that nothing changes."""
FIRST_POLL_S: Final = 0.03
LONGEST_POLL_S: Final = 1.0
"""Shortest and longest time between polls for an outcome, or for a change without a daemon."""
BLOCKED_POLL_S: Final = 0.01
"""Time between polls while a call waits."""
POLL_S_PER_RANK: Final = 25e-6
"""Least time between polls, per rank of the job: the store answers some 50,000 requests a second."""
LEAST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 0.25
"""Shortest and longest time between rank 0's polls for answers. Other ranks first poll after the longest."""
KEPT: Final = 0.9
"""If answers came sooner than last time, the expected time falls to this share at most: a poll too early is wasted."""
FOREVER_S: Final = 3600.0
"""How long the thread sleeps when only a notification or an offer can wake it."""
REPEAT_AFTER_S: Final = (0.1, 0.5, 2.0, 8.0, 16.0, 32.0)
"""Pauses before rank 0 asks again for communicators that were left out, and before a rank retries a failed store."""
CLOSE_TIMEOUT_S: Final = 2.0
MOST_PLANS: Final = 64
"""Latest plans whose rows are kept; the latest steps run under fewer."""
CHANGE_KEY: Final = "change"
"""Holds the latest change only: a late rank needs no earlier one."""


@dataclass(frozen=True)
class AgreementCounters:
    """Counters of one rank's agreement."""

    state: str
    """`starting`, `agreeing`, `off` (ranks differ in versions) or `lost` (no store)."""
    n_changes: int
    """Changes whose outcome this rank has learned."""
    n_adopted: int
    """Changes that switched a communicator of this rank."""
    n_store_requests: int
    n_requests_at_start: int
    """Requests before this rank was ready for changes."""
    n_requests_at_rest: int
    """Requests after the job's start while no change was under way."""
    n_waits: int
    """Calls that waited for an outcome."""
    longest_wait_us: float
    left_out: tuple[tuple[str, str], ...]
    """(communicator, reason), for each communicator that the latest change left out."""


class Agreement:
    """Owns thread `zerotune-agreement`: one rank's part in adopting plans together.

    Args:
        store: the agent's own connection to the job's store, below its prefix.
        notify: notifies the other ranks that a change is announced or decided; called on this thread.
        fingerprint: versions that must be equal on all ranks (plugin layout, NCCL, tuner ABI).
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        plugin: Plugin,
        notify: Callable[[int], None],
        *,
        fingerprint: str = "",
    ) -> None:
        self._exchange = Exchange(store)
        self._rank = rank
        self._world_size = world_size
        self._plugin = plugin
        self._members = Members(plugin, world_size)
        self._notify = notify
        self.fingerprint = f"{_version()} wire={WIRE_VERSION} world={world_size} {fingerprint}"
        self._inbox: deque[News] = deque()
        self._proposer = Proposer() if rank == 0 else None
        self._left_alone: set[str] = set()
        self._absent: set[int] = set()
        """Rank 0: ranks that did not answer the latest change. The next change does not wait for them."""
        self._have_all_answered = False
        """Rank 0: all ranks have answered the latest change, and so learned the outcomes of earlier changes."""
        self._n_deleted = 0
        """Rank 0: the outcomes of this many changes are deleted."""
        self._answers_take_s = LEAST_PAUSE_S
        """Rank 0: how long all answers took lately; it does not poll for them sooner."""
        self._blocked_poll_s = max(BLOCKED_POLL_S, POLL_S_PER_RANK * world_size)
        self._next = 1
        """Number of the next change, as far as this rank has seen."""
        self._notified = 0
        """Number of the latest change of which this rank was notified; 0 after it has read the store."""
        self._wake = threading.Event()
        self._is_closing = False
        self._poll_until_s = 0.0
        """Until when this rank polls for changes, since no daemon notifies it."""
        self._poll_pause_s = FIRST_POLL_S
        self._has_daemon = True
        self._repeat_at_s = float("inf")
        self._n_repeats = 0
        self._n_at_start = self._n_at_rest = 0
        self._n_changes = self._n_adopted = 0
        self._has_plan = False
        self.epoch_elsewhere = 0
        """Epoch of the latest plan that only communicators without this rank have adopted."""
        self._left_out: dict[str, str] = {}
        self.rows_of: dict[int, tuple[PlanRow, ...]] = {}
        """Rank 0: the rows of the latest plans that communicators adopted, by epoch."""
        self.controls: tuple[int, ...] = ()
        """Epochs of the latest control windows, known before they begin."""
        self.state = "starting"
        self.n_refused_plans = 0
        self.incarnation: int | None = None
        """Number of this start of the job on its store, from 1; None until this rank knows it."""
        self._thread = threading.Thread(target=self._run, name="zerotune-agreement", daemon=True)
        self._thread.start()

    # ---- any thread --------------------------------------------------------------------------

    def post(self, news: News) -> None:
        """Queue `news` for the agreement's thread, and wake that."""
        self._inbox.append(news)
        self._wake.set()

    def counters(self) -> AgreementCounters:
        """A snapshot of the counters."""
        n_waits, longest_us, _ = self._plugin.waits()
        return AgreementCounters(
            self.state,
            self._n_changes,
            self._n_adopted,
            self._exchange.n_requests,
            self._n_at_start,
            self._n_at_rest,
            n_waits,
            longest_us,
            tuple(sorted(self._left_out.items())),
        )

    def close(self) -> None:
        """Stop taking part. Never raises; the plan in force stays."""
        self._is_closing = True
        self._exchange.close()
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    # ---- the agreement's thread --------------------------------------------------------------

    def _run(self) -> None:
        try:
            if not self._start_job():
                return
            self.state = "agreeing"
            self._n_at_start = self._exchange.n_requests
            n_failures = 0
            while True:
                self._await_work()
                try:
                    self._propose(self._proposer) if self._proposer is not None else self._follow()
                    n_failures = 0
                except RuntimeError:
                    if n_failures == len(REPEAT_AFTER_S) or self._is_closing:
                        raise
                    self._repeat_at_s = time.monotonic() + REPEAT_AFTER_S[n_failures]
                    self._wake.wait(REPEAT_AFTER_S[n_failures])
                    n_failures += 1
        except Closed:
            pass
        except Exception as error:
            if not self._is_closing:
                self.state = "lost"
                logger.warning("zerotune: tuning ends, plans stay as they are: the job's store is gone: %s", error)

    def _start_job(self) -> bool:
        exchange, world_size = self._exchange, self._world_size
        if self._proposer is not None:
            self.incarnation = job_start.begin_incarnation(exchange)
            is_alike = job_start.compare(exchange, world_size, self.fingerprint)
        else:
            self.incarnation, is_alike = job_start.join(exchange, self._rank, world_size, self.fingerprint)
        if not is_alike:
            self.state = "off"
            if self._rank == 0:
                logger.warning("zerotune: tuning stays off: ranks differ in versions; rank 0 has %s", self.fingerprint)
        return is_alike

    def _await_work(self) -> None:
        """Sleep until there is work; raises `Closed` when the agreement is closed."""
        proposer = self._proposer
        while not self._is_closing:
            while self._inbox:
                self._handle(self._inbox.popleft())
            now_s = time.monotonic()
            if proposer is not None:
                if proposer.offered is not None or now_s >= self._repeat_at_s:
                    return
                pause_s = min(self._repeat_at_s - now_s, FOREVER_S)
            elif self._notified >= self._next:
                return
            elif now_s < self._poll_until_s:
                pause_s, self._poll_pause_s = self._poll_pause_s, min(2.0 * self._poll_pause_s, LONGEST_POLL_S)
            else:
                pause_s = FOREVER_S if self._has_daemon or not self._has_plan else LONGEST_POLL_S
            if not self._wake.wait(pause_s) and proposer is None and pause_s < FOREVER_S:
                return
            self._wake.clear()
        raise Closed

    def _handle(self, news: News) -> None:
        now_s = time.monotonic()
        match news:
            case Offered(plan) if self._proposer is not None:
                self._n_repeats = 0
                if not self._proposer.offer(plan):
                    self._refuse(plan, f"its epoch does not rise above {self._proposer.highest.epoch}")
            case Withdrawn() if self._proposer is not None:
                self._proposer.withdraw()
            case NewCommunicator() | Notified(0) if self._proposer is not None:
                self._n_repeats, self._repeat_at_s = 0, now_s + REPEAT_AFTER_S[0]
            case Notified(number):
                self._notified = max(self._notified, number)
            case DaemonState(is_answering):
                self._has_daemon = is_answering
            case PollFor(for_s):
                self._poll_until_s, self._poll_pause_s = now_s + for_s, FIRST_POLL_S

    def _propose(self, proposer: Proposer) -> None:
        self._repeat_at_s = float("inf")
        plan = proposer.offered
        if plan is not None and not self._can_load(proposer, plan):
            return
        change = proposer.announce(self._next, plan)
        if change is None:
            return
        self._next += 1
        self._have_all_answered = False
        self._exchange.set(CHANGE_KEY, encode(change))
        self._notify(change.number)
        outcome = self._take_part(change)
        self._notify(change.number)
        proposer.learn(outcome)
        if outcome.switches:
            rows_of = self.rows_of | {stage.epoch: stage.rows for _, stage in change.plan.stages()}
            self.rows_of = dict([*rows_of.items()][-MOST_PLANS:])  # a copy: another thread may read the old one
        self._remember(outcome)
        if self._have_all_answered:
            for number in range(self._n_deleted + 1, change.number):
                self._exchange.delete(_outcome_key(number))
            self._n_deleted = change.number - 1

    def _follow(self) -> None:
        """Read the latest change; take part if it is new."""
        n_before = self._exchange.n_requests
        data = self._exchange.read(CHANGE_KEY)
        change = None if data is None else decode(data, PlanChange)
        if change is not None and change.number >= self._next:
            self._next, self._poll_pause_s = change.number + 1, FIRST_POLL_S
            self._take_part(change)
            return
        self._notified = 0
        self._n_at_rest += self._exchange.n_requests - n_before

    def _take_part(self, change: PlanChange) -> Outcome:
        """Answer, learn the outcome, and carry it out."""
        self.controls = (*self.controls, *change.plan.control_epochs)[-MOST_PLANS:]
        try:
            answer = Answer(change.number, self._rank, self._members.answer(change))
        except Exception as error:  # the answer promises nothing, so that no communicator of this rank switches
            self._members.give_up()
            self._refuse(change.plan, str(error))
            answer = Answer(change.number, self._rank, refusal=str(error)[:200])
        data = self._learn(change, answer)
        try:
            outcome = decode_outcome(data, change)
        except WireError as error:
            logger.warning("zerotune: change %d is dropped: %s", change.number, error)
            outcome = Outcome(change.number, is_given_up=True)
        self._n_changes += 1
        mine = {member.key for member in answer.members if member.promise}
        if mine & outcome.switches.keys():
            self._n_adopted += 1
            self._has_plan = bool(change.plan.rows or change.plan.then)
        elif outcome.switches:
            self.epoch_elsewhere = change.plan.epoch
        self._left_out = {**outcome.reasons}
        if not self._members.carry_out(outcome):
            self.state = "lost"
            logger.error("zerotune: rank %d waited too long to follow change %d", self._rank, change.number)
        return outcome

    def _learn(self, change: PlanChange, answer: Answer) -> bytes:
        """The outcome. Other ranks may rely on this rank's promises by now: they hold, whatever fails."""
        try:
            if self._proposer is not None:
                return self._decide(change, answer)
            self._exchange.append(_answers_key(change.number), framed(self._rank, encode(answer)))
        except Exception as error:
            logger.warning("zerotune: change %d: %s", change.number, error)
        return self._await_outcome(change.number)

    def _await_outcome(self, number: int) -> bytes:
        """The outcome. After PATIENCE_S this rank writes that nothing changes, unless an outcome is written."""
        key = _outcome_key(number)
        began_s = time.monotonic()
        pause_s = max(LONGEST_PAUSE_S, 10.0 * POLL_S_PER_RANK * self._world_size)  # a notification comes sooner
        while True:
            self._pause(pause_s)
            pause_s = max(pause_s, min(2.0 * pause_s, LONGEST_POLL_S))
            try:
                if self._is_closing or time.monotonic() - began_s > PATIENCE_S:
                    return self._exchange.set_once(key, encode(Outcome(number, is_given_up=True)))
                data = self._exchange.read(key)
            except RuntimeError as error:  # the store may come back
                if self._is_closing:
                    raise
                logger.warning("zerotune: the outcome of change %d is not known: %s", number, error)
                continue
            if data is not None:
                return data

    def _pause(self, pause_s: float) -> None:
        """Sleep for `pause_s`; end sooner at a notification, or soon after a call begins to wait."""
        until_s = time.monotonic() + pause_s
        while not self._is_closing and (left_s := until_s - time.monotonic()) > 0:
            if self._plugin.waits()[2]:
                until_s = min(until_s, time.monotonic() + self._blocked_poll_s)
            if self._wake.wait(min(left_s, BLOCKED_POLL_S)):
                break
        self._wake.clear()

    # ---- rank 0 ------------------------------------------------------------------------------

    def _decide(self, change: PlanChange, own: Answer) -> bytes:
        """Write the outcome, once all answers are here or time is up; returns the outcome that is in the store."""
        if self._absent:  # ranks whose answers came late are waited for again
            self._absent -= self._answers(change.number - 1).keys()
        if change.number > 1:
            self._exchange.delete(_answers_key(change.number - 1))
        n_expected = self._world_size - 1 - len(self._absent)
        began_s, pause_s = time.monotonic(), self._answers_take_s
        while True:
            time.sleep(pause_s)
            known, took_s = self._answers(change.number), time.monotonic() - began_s
            if len(known) >= n_expected or took_s > DECIDE_S or self._is_closing:
                break
            pause_s = min(max(LEAST_PAUSE_S, took_s), LONGEST_PAUSE_S)
        self._answers_take_s = min(max(took_s, KEPT * self._answers_take_s), LONGEST_PAUSE_S)
        self._absent = {rank for rank in range(1, self._world_size) if rank not in known}
        self._have_all_answered = not self._absent
        answers = [own, *(_answer_in(data, change.number, rank) for rank, data in known.items())]
        outcome = decide(change, answers, self._left_alone)
        return self._exchange.set_once(_outcome_key(change.number), encode(outcome))

    def _answers(self, number: int) -> dict[int, bytes]:
        return frames(self._exchange.read(_answers_key(number)) or b"")

    def _remember(self, outcome: Outcome) -> None:
        for key in outcome.left_alone:
            self._left_alone.add(key)
            why = Why.histories_differ.value
            logger.warning("zerotune: communicator %s is left at NCCL's own choice: %s", key, why)
        reasons = (Why.__members__.get(why) for why in outcome.reasons.values())
        is_temporary = any(why is not None and why.is_temporary for why in reasons)
        if (is_temporary or outcome.is_given_up) and self._n_repeats < len(REPEAT_AFTER_S):
            self._repeat_at_s = time.monotonic() + REPEAT_AFTER_S[self._n_repeats]
            self._n_repeats += 1

    def _can_load(self, proposer: Proposer, plan: Plan) -> bool:
        """Whether rank 0 can prepare the plan, and other ranks can decode it."""
        try:
            self._plugin.prepare(plan)
            decode(encode(PlanChange(1, plan)), PlanChange)
        except Exception as error:
            proposer.refuse(plan)
            self._refuse(plan, str(error))
            return False
        return True

    def _refuse(self, plan: Plan, reason: str) -> None:
        self.n_refused_plans += 1
        if self.n_refused_plans == 1:
            logger.warning("zerotune: the plan of epoch %d is refused: %s", plan.epoch, reason)


def _answer_in(data: bytes, number: int, rank: int) -> Answer:
    """The answer in `data`; malformed data count as a refusal."""
    try:
        answer = decode(data, Answer)
    except WireError as error:
        logger.warning("zerotune: an answer is dropped: %s", error)
        return Answer(number, rank, refusal=str(error))
    return Answer(number, rank, answer.members if answer.number == number else (), answer.refusal)


def _answers_key(number: int) -> str:
    return f"answers/{number}"


def _outcome_key(number: int) -> str:
    return f"outcome/{number}"


def _version() -> str:
    try:
        return importlib.metadata.version("zerotune")
    except importlib.metadata.PackageNotFoundError:
        return "uninstalled"
