"""The agreement protocol as a pure state machine: no threads, no sockets, no clocks.

A *boundary* is the end of an optimizer step, counted from 1 on each rank. An *agreed boundary* is one at
which all ranks obey the same `BoundaryMessage`, which rank 0 wrote for exactly that boundary when it
crossed the agreed boundary before. Between them nothing can change. `Follower` is what every rank knows
(rank 0 too: it obeys what it reads back, never what it wrote), `Leader` is how rank 0 chooses the next message.

The model checker in tests/agreement drives these very classes through every interleaving.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from zerotune.store.errors import WireError
from zerotune.store.records import Plan

BASELINE_PLAN: Final = Plan(epoch=0)
"""What every job starts with and an expired plan gives way to."""

PROMISE_LEAD: Final = 2
"""Boundaries between a rank's promise and the first one it will not cross without rank 0's message.

One more than the least possible, so that the first message normally arrives while training goes on.
"""


class BoundaryMessage(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 says for one boundary: what is in force from there, and at which boundary the next message is due.

    `plan` is None to keep the plan in force ("keep"). `n_calls` is rank 0's count of collectives on
    the world communicator at the agreed boundary before, counted from the first; negative when there was
    none before.
    """

    boundary: int
    next_boundary: int
    epoch: int
    n_calls: int
    plan: Plan | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BoundaryMessage)


def encode_message(message: BoundaryMessage) -> bytes:
    """The bytes that travel through the store."""
    return _encoder.encode(message)


def decode_message(data: bytes) -> BoundaryMessage:
    """The message in `data`.

    Raises:
        WireError: `data` is not a message of this version, or contradicts itself.
    """
    try:
        message = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"message cannot be decoded: {error}") from error
    if message.next_boundary <= message.boundary or (message.plan is not None and message.plan.epoch != message.epoch):
        raise WireError(f"message for boundary {message.boundary} contradicts itself")
    return message


@dataclass(slots=True)
class Crossing:
    """What a rank learned when it crossed an agreed boundary."""

    boundary: int
    n_calls: int
    """This rank's own count of collectives at this agreed boundary, from the first one."""
    is_change: bool
    is_lockstep: bool
    """False when this rank's count at the agreed boundary before was not rank 0's."""
    is_checked: bool
    """True when a count over at least one full interval was compared."""


@dataclass(slots=True)
class Follower:
    """One rank's side: which boundary it is at, and what it may not cross without a message."""

    boundary: int = 0
    """Boundaries reached so far."""
    due: int | None = None
    """The next boundary that needs a message from rank 0; None before the job has started."""
    message: BoundaryMessage | None = None
    """The message for `due`, once it is here."""
    epoch: int = 0
    n_agreed: int = 0
    """Agreed boundaries crossed."""
    n_calls_start: int = 0
    n_calls: int = 0
    """Own count at the last agreed boundary, from the first."""

    def promise(self) -> int:
        """From now on stop at the returned boundary until the first agreed boundary is known."""
        self.due = self.boundary + PROMISE_LEAD
        return self.due

    def receive(self, message: BoundaryMessage) -> None:
        """Take rank 0's message, which must not lie before what this rank promised.

        Raises:
            WireError: the message is for another boundary than the one due.
        """
        is_early = self.due is None or message.boundary < self.due
        if is_early or (self.n_agreed > 0 and message.boundary != self.due):
            raise WireError(f"message for boundary {message.boundary} arrived, {self.due} is due")
        self.due = message.boundary
        self.message = message

    def arrive(self) -> bool:
        """Reach the next boundary; True when it is an agreed boundary, or one that waits to become one."""
        self.boundary += 1
        return self.due is not None and self.boundary >= self.due

    @property
    def is_blocked(self) -> bool:
        """The boundary reached needs a message that is not here yet."""
        return self.due is not None and self.boundary >= self.due and self.message is None

    @property
    def is_agreed(self) -> bool:
        """The boundary reached is the one that the message is for."""
        return self.message is not None and self.boundary == self.message.boundary

    def cross(self, n_calls: int) -> Crossing:
        """Obey the message for the boundary reached; only when `is_agreed`.

        `n_calls`: collectives that this rank enqueued on the world communicator since it started.
        """
        message = self.message
        if message is None or message.boundary != self.boundary:
            raise ValueError(f"boundary {self.boundary} is not an agreed one")
        if self.n_agreed == 0:
            self.n_calls_start = n_calls
        previous = self.n_calls
        self.n_calls = n_calls - self.n_calls_start
        crossing = Crossing(
            boundary=message.boundary,
            n_calls=self.n_calls,
            is_change=message.epoch != self.epoch,
            is_lockstep=self.n_agreed == 0 or message.n_calls == previous,
            is_checked=self.n_agreed >= 2,
        )
        self.n_agreed += 1
        self.epoch = message.epoch
        self.due = message.next_boundary
        self.message = None
        return crossing

    def abandon(self) -> None:
        """Never wait again; the plan in force stays."""
        self.due = None
        self.message = None


@dataclass(frozen=True, slots=True)
class Pacing:
    """How far agreed boundaries lie apart, in boundaries.

    `base` while plans are changing; after `n_quiet` agreed boundaries without news the distance doubles with each
    agreed boundary up to `limit`. Only rank 0 applies this; the others read `next_boundary`.
    """

    base: int = 1
    limit: int = 8
    n_quiet: int = 8

    def interval(self, n_quiet_boundaries: int) -> int:
        """Boundaries to the next agreed one, after `n_quiet_boundaries` agreed ones without news."""
        doublings = min(max(0, n_quiet_boundaries - self.n_quiet), 30)
        return min(self.base << doublings, max(self.base, self.limit))


@dataclass(slots=True)
class Leader:
    """Rank 0's side: what the next message says. Takes offers from a daemon, never waits for one."""

    pacing: Pacing = field(default_factory=Pacing)
    plan: Plan = BASELINE_PLAN
    """The plan in force from the last message written."""
    offered: Plan | None = None
    is_daemon_alive: bool = False
    is_confirmed: bool = False
    """All ranks have counted the same collectives as rank 0 over a whole interval."""
    is_frozen: bool = False
    """Ranks were seen out of step: the plan in force stays for good."""
    renewed_at: int = 0
    adopted_at: int = 0
    """The boundary at which the plan in force was adopted."""
    highest: Plan = BASELINE_PLAN
    next_boundary: int = 0
    """The boundary that the next message is for."""
    n_quiet_boundaries: int = 0

    def offer(self, plan: Plan) -> bool:
        """Take the daemon's latest plan; False when its epoch does not rise."""
        self.is_daemon_alive = True
        if plan == self.plan:
            self.offered = None
            return True
        if plan.epoch < max(1, self.highest.epoch) or (plan.epoch == self.highest.epoch and plan != self.highest):
            return False
        self.offered = plan
        return True

    def renew(self) -> None:
        """The daemon is there (again)."""
        self.is_daemon_alive = True

    def withdraw(self) -> None:
        """The daemon is gone: forget its offer, let the plan in force run to its expiry."""
        self.is_daemon_alive = False
        self.offered = None

    def refuse(self, plan: Plan) -> None:
        """`plan` cannot be loaded here, so nobody is asked to."""
        if self.offered is plan:
            self.offered = None

    def freeze(self) -> None:
        """Change nothing any more."""
        self.is_frozen = True

    def first_message(self, promises: Iterable[int]) -> BoundaryMessage:
        """The first agreed boundary lies where the last of the ranks has promised to stop."""
        boundary = max(promises)
        self.renewed_at = boundary
        self.next_boundary = boundary + self.pacing.interval(0)
        return BoundaryMessage(boundary, self.next_boundary, epoch=0, n_calls=-1)

    def news(self) -> Plan | None:
        """The plan that the next agreed boundary would bring; None to keep. Load it before `next_message`."""
        if self.is_frozen or not self.is_confirmed:
            return None
        if self.offered is not None:
            return self.offered
        later = self.plan.at(self.next_boundary - self.adopted_at)
        if later is not self.plan:
            return later
        n_boundaries = self.next_boundary - self.renewed_at
        if not self.is_daemon_alive and self.plan.epoch != 0 and n_boundaries >= self.plan.expires_after:
            return BASELINE_PLAN
        return None

    def next_message(self, n_calls: int, news: Plan | None) -> BoundaryMessage:
        """The value for the next agreed boundary, to be written when rank 0 has crossed the one before.

        `n_calls` is rank 0's `Crossing.n_calls` there, `news` what `news()` said and could be loaded.
        """
        boundary = self.next_boundary
        if self.is_daemon_alive:
            self.renewed_at = boundary
        if news is None:
            self.n_quiet_boundaries += 1
        else:
            self.n_quiet_boundaries = 0
            self.plan = news
            self.renewed_at = self.adopted_at = boundary
            if news.epoch > self.highest.epoch:
                self.highest = news
            if self.offered is news:
                self.offered = None
        self.next_boundary = boundary + self.pacing.interval(self.n_quiet_boundaries)
        return BoundaryMessage(boundary, self.next_boundary, self.plan.epoch, n_calls, news)
