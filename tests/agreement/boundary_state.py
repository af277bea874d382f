"""States of the model of a job under agreement: ranks, the leader, the store, and what must still come true."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

from zerotune.agent.agreement.protocol import Follower, Leader, Pacing

T = TypeVar("T")
Machine = TypeVar("Machine", Follower, Leader)

EVERY_BOUNDARY = Pacing(base=1, limit=1)


class Violation(AssertionError):
    """A property does not hold; the message ends in the actions that lead there."""


@dataclass(frozen=True)
class Bounds:
    n_ranks: int = 2
    n_boundaries: int = 7
    n_daemon_events: int = 2
    restarts: tuple[int, ...] = ()
    """Numbers of ranks with which the job may start again."""
    pacing: Pacing = EVERY_BOUNDARY
    expires_after: int = 2
    look_boundaries: int = 0
    """Plans end by themselves after so many; 0: they do not."""
    skips_boundary: int | None = None
    """The last rank's program leaves one boundary out after this many: ranks out of step."""
    n_losses: int = 0
    """Ranks that may lose the store."""
    n_wipes: int = 0
    """Times that the store may forget everything."""
    n_amnesias: int = 0
    """Times that a daemon may come that knows nothing of the epochs before, having no store."""
    reduced: bool = False
    with_start: bool = True
    """False starts from a finished job start and confirmed lockstep, to spend the bounds on agreed boundaries."""


def shallow(one: T) -> T:
    """What `copy.copy` makes, in a fifth of the time: most of an exploration is copies."""
    made = object.__new__(type(one))
    made.__dict__.update(one.__dict__)
    return made


@dataclass
class Rank:
    follower: Follower
    background: str = "look"
    incarnation: int = 0
    is_lost: bool = False
    """Its background thread has no store any more."""
    n_calls: int = 0
    """Collectives enqueued; also the number of boundaries in the program so far."""
    n_calls_at_agreed: int = 0
    crossed: int = 0
    """The last agreed boundary crossed."""
    has_confirmed: bool = False
    must_report: bool = False
    must_confirm: bool = False
    number: int | None = None
    """What `State.key` calls this state of a rank; None when it has not been asked since the last change."""

    def copy(self) -> Rank:
        rank = shallow(self)
        rank.follower = again(rank.follower)
        rank.number = None
        return rank

    def key(self) -> tuple[object, ...]:
        return (*_flat(self.follower), *_rank_fields(self))


@dataclass
class State:
    ranks: list[Rank]
    leader: Leader
    store: dict[tuple[object, ...], object] = field(default_factory=dict)
    restarts: tuple[int, ...] = ()
    n_losses: int = 0
    n_wipes: int = 0
    n_amnesias: int = 0
    n_daemon_events: int = 0
    n_offers: int = 0
    epochs: dict[int, int] = field(default_factory=dict)
    """Epoch of call k, as the first rank to enqueue it saw it."""
    deadline: tuple[int, int] | None = None
    """An offer's epoch, and the agreed boundary at which rank 0 must adopt it or a later one."""
    look: tuple[int, int] | None = None
    """A first look's epoch, and the boundary at which rank 0 must end it."""
    gone_by: int | None = None
    """The agreed boundary at which rank 0 must be back at the baseline, with the daemon dead."""

    def key(self, numbers: dict[tuple[object, ...], int]) -> tuple[object, ...]:
        """Everything that the future depends on; ranks other than 0 are interchangeable.

        `numbers` has a number for each state of a rank that was met.
        """
        slowest = self.ranks[0].n_calls
        for rank in self.ranks:
            if rank.n_calls < slowest:
                slowest = rank.n_calls
            if rank.number is None:
                rank.number = numbers.setdefault(rank.key(), len(numbers))
        return (
            self.ranks[0].number,
            tuple(sorted(rank.number for rank in self.ranks[1:])),
            _flat(self.leader),
            frozenset(self.store.items()),
            self.restarts,
            self.n_losses,
            self.n_wipes,
            self.n_amnesias,
            self.n_daemon_events,
            tuple(sorted((k, e) for k, e in self.epochs.items() if k > slowest)),
            self.deadline,
            self.look,
            self.gone_by,
        )


_rank_fields = attrgetter(*(name for name in Rank.__dataclass_fields__ if name not in ("follower", "number")))
_follower_fields = attrgetter(*Follower.__dataclass_fields__)
_leader_fields = attrgetter(*Leader.__dataclass_fields__)


def again(machine: Machine) -> Machine:
    """The same for what has slots instead of a dictionary."""
    return type(machine)(*_flat(machine))


def _flat(machine: Follower | Leader) -> tuple[object, ...]:
    return (_follower_fields if isinstance(machine, Follower) else _leader_fields)(machine)
