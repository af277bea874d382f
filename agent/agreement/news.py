"""News from other threads to the agreement's thread, as values."""

from __future__ import annotations

from dataclasses import dataclass

from ...store.records import Plan


@dataclass(frozen=True)
class Offered:
    """The daemon's latest plan; rank 0's alone. A plan whose epoch does not rise is refused."""

    plan: Plan


@dataclass(frozen=True)
class Withdrawn:
    """The daemon has been gone for long: all communicators go back to NCCL's own choice."""


@dataclass(frozen=True)
class Rung:
    """Rank 0 has announced or decided the change of this number; 0: another rank has a new communicator."""

    number: int


@dataclass(frozen=True)
class CommunicatorCame:
    """There is a new communicator, here or elsewhere, which may want the plan in force."""


@dataclass(frozen=True)
class Watched:
    """Whether a daemon is there, which would ring."""

    is_watched: bool


@dataclass(frozen=True)
class Unwatched:
    """No daemon will ring: look for changes for so long from now on."""

    for_s: float


News = Offered | Withdrawn | Rung | CommunicatorCame | Watched | Unwatched
