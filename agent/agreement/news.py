"""News from other threads to the agreement's thread, as values."""

from __future__ import annotations

from dataclasses import dataclass

from ...store.records import Plan


@dataclass(frozen=True)
class Offered:
    """The daemon's latest plan, for rank 0 alone. A plan whose epoch does not rise is refused."""

    plan: Plan


@dataclass(frozen=True)
class Withdrawn:
    """The daemon has been silent for long: all communicators return to NCCL's own choice."""


@dataclass(frozen=True)
class Notified:
    """The daemon's notification: rank 0 has announced or decided change `number`; 0: a rank has a new communicator."""

    number: int


@dataclass(frozen=True)
class NewCommunicator:
    """This rank has a new communicator, which may need the plan in force."""


@dataclass(frozen=True)
class DaemonState:
    """Whether a daemon answers, which would notify this rank of changes."""

    is_answering: bool


@dataclass(frozen=True)
class PollFor:
    """Without a daemon: poll for changes for `for_s` from now on."""

    for_s: float


News = Offered | Withdrawn | Notified | NewCommunicator | DaemonState | PollFor
