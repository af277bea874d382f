"""`Agreement`: the protocol between a training thread and a background thread with the store.

The training thread counts, compares and flips. The background thread reads rank 0's next message ahead of time,
loads its plan into the inactive table, and on rank 0 writes the one after.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import torch.distributed as dist

from zerotune.agent.agreement import job_start
from zerotune.agent.agreement.exchange import Closed, Exchange
from zerotune.agent.agreement.plan_table import PlanTable
from zerotune.agent.agreement.protocol import (
    BoundaryMessage,
    Crossing,
    Follower,
    Leader,
    Pacing,
    decode_message,
    encode_message,
)
from zerotune.store.errors import RankDisagreement
from zerotune.store.records import Plan, agreement_interval
from zerotune.store.wire import WIRE_VERSION

logger = logging.getLogger("zerotune.agreement")

BOUNDARIES_PER_ACKNOWLEDGEMENT = 64
"""Every so many agreed boundaries a rank says that it has read them; then rank 0 deletes them."""
CLOSE_TIMEOUT_S = 2.0
CONFIRMED_KEY = "lockstep/confirmed"
ALL_CONFIRMED_KEY = "lockstep/all"
MISMATCH_KEY = "lockstep/mismatch"


def pacing_for(world_size: int) -> Pacing:
    """Agreed boundaries far enough apart for one store to serve `world_size` ranks."""
    base = agreement_interval(world_size)
    return Pacing(base=base, limit=8 * base)


class Agreement:
    """One rank's part in adopting plans together.

    Args:
        store: a connection of our own to the job's store, below a prefix of ours.
        rank, world_size: of the default process group.
        plan_table: where plans are loaded and flipped.
        calls_on_world: collectives enqueued so far on communicators of all ranks; called once per agreed boundary.
        fingerprint: what else must be equal on all ranks (plugin layout, NCCL version, tuner ABI).
        timeout_s: the process group's timeout.
        pacing: distance of agreed boundaries; only rank 0's counts.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        plan_table: PlanTable,
        calls_on_world: Callable[[], int],
        *,
        fingerprint: str = "",
        timeout_s: float = 600.0,
        pacing: Pacing | None = None,
    ) -> None:
        self._exchange = Exchange(store)
        self._rank = rank
        self._world_size = world_size
        self._plan_table = plan_table
        self._calls_on_world = calls_on_world
        self.fingerprint = f"{_version()} wire={WIRE_VERSION} world={world_size} {fingerprint}"
        # A peer that has the message goes on, and its next collective waits for this rank: after two timeouts
        # its watchdog has ended the job. A rank that still lives then knows that no rank has the message.
        self.patience_s = 2 * timeout_s + 60.0
        """How long the training thread waits for rank 0's message."""
        self._changed = threading.Condition(threading.Lock())
        self._follower = Follower()
        self._leader = Leader(pacing or pacing_for(world_size)) if rank == 0 else None
        # A bare lock, open when there is a crossing: a third of what a condition costs the training thread.
        self._crossed = threading.Lock()
        self._crossed.acquire()
        self._crossing: Crossing | None = None
        self._is_closing = False
        self._failure: RankDisagreement | None = None
        self.state = "starting"
        """`starting`, `agreeing`, `frozen` (the plan stays), `off` (never started) or `lost` (no store)."""
        self.incarnation: int | None = None
        """Which start of the job on this store, from 1; None until this rank knows."""
        self.n_agreed = 0
        self.n_waits = 0
        """Agreed boundaries at which the training thread had to wait for rank 0's message."""
        self.wait_us = 0.0
        self.n_refused_plans = 0
        self.n_mismatches = 0
        self._thread = threading.Thread(target=self._run, name="zerotune-agreement", daemon=True)
        self._thread.start()

    @property
    def n_store_requests(self) -> int:
        """Requests that this rank has sent to the store."""
        return self._exchange.n_requests

    # ---- rank 0, any thread ------------------------------------------------------------------

    def offer(self, plan: Plan) -> None:
        """The daemon's latest plan; ignored on other ranks. A plan whose epoch does not rise is refused."""
        if self._leader is None:
            return
        with self._changed:
            is_taken = self._leader.offer(plan)
        if not is_taken:
            self._refuse(plan, f"its epoch does not rise above {self._leader.highest.epoch}")

    def renew(self) -> None:
        """The daemon is there, with or without an offer: the plan in force does not expire."""
        if self._leader is not None:
            with self._changed:
                self._leader.renew()

    def withdraw(self) -> None:
        """The daemon is gone: the plan in force gives way to the baseline `expires_after` boundaries on."""
        if self._leader is not None:
            with self._changed:
                self._leader.withdraw()

    # ---- training thread ---------------------------------------------------------------------

    def boundary(self) -> int:
        """Reach the next boundary and return the epoch in force from here.

        Call at the end of each optimizer step, at the same point of the program on all ranks.

        Raises:
            RankDisagreement: the other ranks adopt a plan that this rank cannot have.
        """
        follower = self._follower
        with self._changed:
            if not follower.arrive():
                return follower.epoch
            if follower.is_blocked:
                self._wait_for_message()
            if self._failure is not None:
                raise self._failure
            if follower.is_agreed:
                crossing = follower.cross(self._count_calls())
                if crossing.is_change:
                    self._plan_table.flip(follower.epoch)
                self.n_agreed += 1
                self._crossing = crossing
                self._crossed.release()
            return follower.epoch

    def close(self) -> None:
        """Stop taking part. Never raises; the plan in force stays."""
        with self._changed:
            self._is_closing = True
            self._exchange.close()
            self._follower.abandon()
            if self._crossed.locked():
                self._crossed.release()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _count_calls(self) -> int:
        """A count that cannot be had differs from every true one: this rank still crosses, and reports."""
        try:
            return self._calls_on_world()
        except Exception as error:
            logger.warning("zerotune: collectives cannot be counted: %s", error)
            return -(2**31)

    def _wait_for_message(self) -> None:
        follower = self._follower
        self.n_waits += 1
        start_s = time.perf_counter()
        if not self._changed.wait_for(lambda: not follower.is_blocked or self._failure is not None, self.patience_s):
            follower.abandon()
            self.state = "lost"
            self._exchange.close()
            logger.warning(
                "zerotune: no message from rank 0 at boundary %d for %.0f s; the plan of epoch %d stays for good",
                follower.boundary,
                self.patience_s,
                follower.epoch,
            )
        self.wait_us += (time.perf_counter() - start_s) * 1e6

    # ---- background thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._start_job():
                self.state = "agreeing"
                self._follow_messages()
        except Closed:
            pass
        except RankDisagreement as failure:
            with self._changed:
                self._failure = failure
                self._changed.notify()
        except Exception as error:
            if not self._is_closing:
                self.state = "lost"
                logger.warning("zerotune: agreement lost the job's store: %s", error)

    def _start_job(self) -> bool:
        exchange, world_size = self._exchange, self._world_size
        if self._leader is not None:
            self.incarnation = job_start.found_incarnation(exchange)
            is_alike = job_start.compare(exchange, world_size, self.fingerprint)
        else:
            self.incarnation, is_alike = job_start.join(exchange, world_size, self.fingerprint)
        if not is_alike:
            self.state = "off"
            if self._rank == 0:
                logger.warning("zerotune: tuning stays off: ranks differ in versions; rank 0 has %s", self.fingerprint)
            return False
        with self._changed:
            promised = self._follower.promise()
        job_start.announce_promise(exchange, self._rank, promised)
        leader = self._leader
        if leader is not None:
            job_start.write_first_message(
                exchange, world_size, lambda promises: encode_message(leader.first_message(promises))
            )
        return True

    def _follow_messages(self) -> None:
        exchange = self._exchange
        read: deque[int] = deque()
        has_confirmed = False
        message = job_start.read_first_message(exchange)
        while True:
            self._receive(message)
            crossing = self._next_crossing()
            if not crossing.is_lockstep:
                self._report_mismatch(crossing)
            elif crossing.is_checked and not has_confirmed:
                has_confirmed = True
                if exchange.add(CONFIRMED_KEY) == self._world_size:
                    exchange.set(ALL_CONFIRMED_KEY, b"1")
            if self._leader is not None:
                self._publish(self._leader, crossing)
                read.append(crossing.boundary)
            if self.n_agreed % BOUNDARIES_PER_ACKNOWLEDGEMENT == 0:
                exchange.add(f"read/{self.n_agreed}")
                if self._leader is not None:
                    self._delete_read(read)
            message = decode_message(exchange.get(_message_key(message.next_boundary)))

    def _receive(self, message: BoundaryMessage) -> None:
        if message.plan is not None:
            try:
                self._plan_table.load(message.plan)
            except Exception as error:
                raise RankDisagreement(
                    f"rank {self._rank} cannot load the plan of epoch {message.epoch} that rank 0 could: {error}"
                ) from error
        with self._changed:
            self._follower.receive(message)
            self._changed.notify()

    def _next_crossing(self) -> Crossing:
        self._crossed.acquire()
        crossing, self._crossing = self._crossing, None
        if crossing is None:
            raise Closed
        return crossing

    def _report_mismatch(self, crossing: Crossing) -> None:
        self.n_mismatches += 1
        if self.n_mismatches == 1:
            detail = (
                f"rank {self._rank} and rank 0 differ in their count of collectives before boundary {crossing.boundary}"
            )
            logger.warning("zerotune: %s; plans stay as they are", detail)
            self._exchange.set(MISMATCH_KEY, detail.encode())

    def _publish(self, leader: Leader, crossing: Crossing) -> None:
        exchange = self._exchange
        is_confirmed = leader.is_confirmed or exchange.has(ALL_CONFIRMED_KEY)
        is_frozen = leader.is_frozen or exchange.has(MISMATCH_KEY)
        with self._changed:
            leader.is_confirmed = is_confirmed
            if is_frozen and not leader.is_frozen:
                leader.freeze()
                self.state = "frozen"
            news = leader.news()
        if news is not None and not self._can_load(news):
            with self._changed:
                leader.refuse(news)
            news = None
        with self._changed:
            message = leader.next_message(crossing.n_calls, news)
        exchange.set(_message_key(message.boundary), encode_message(message))

    def _can_load(self, plan: Plan) -> bool:
        """Rank 0 asks nobody for what it cannot do itself, nor for what the others could not read."""
        try:
            self._plan_table.load(plan.at_last())
            self._plan_table.load(plan)
            decode_message(encode_message(BoundaryMessage(0, 1, plan.epoch, 0, plan)))
        except Exception as error:
            self._refuse(plan, str(error))
            return False
        return True

    def _refuse(self, plan: Plan, reason: str) -> None:
        self.n_refused_plans += 1
        if self.n_refused_plans == 1:
            logger.warning("zerotune: the plan of epoch %d is refused: %s", plan.epoch, reason)

    def _delete_read(self, read: deque[int]) -> None:
        """Delete the messages of each block that all ranks have read."""
        n_open = len(read)
        while n_open > BOUNDARIES_PER_ACKNOWLEDGEMENT:
            block = self.n_agreed - n_open + BOUNDARIES_PER_ACKNOWLEDGEMENT
            if self._exchange.add(f"read/{block}", 0) < self._world_size:
                return
            for _ in range(BOUNDARIES_PER_ACKNOWLEDGEMENT):
                self._exchange.delete(_message_key(read.popleft()))
            self._exchange.delete(f"read/{block}")
            n_open = len(read)


def _version() -> str:
    try:
        return importlib.metadata.version("zerotune")
    except importlib.metadata.PackageNotFoundError:
        return "uninstalled"


def _message_key(boundary: int) -> str:
    return f"boundary/{boundary}"
