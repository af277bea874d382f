"""The project's error tree: every error a user can meet descends from `ZerotuneError`.

ZerotuneError
├── UserError            a mistake before training starts: one sentence, a remedy, exit code 2
│   ├── FabricError          a fabric file with nonsense
│   ├── TraceError           a trace that is not one, or a broken one
│   │   └── TraceAccessError     the system does not let it be read
│   ├── PlanError            a plan with an illegal cell or overlapping rows
│   ├── BookError            a book of the fleet that is none, is damaged, or is not signed by the pinned key
│   ├── UntrustedError       at the daemon's address there is, or could be, another user's
│   └── StoreError           the store cannot be used
│       ├── StoreVersionError    written by a newer zerotune
│       └── StoreLockedError     another daemon holds it
├── WireError            a malformed, oversized or wrong-version frame
├── PluginError          the tuner plugin cannot be built or loaded
└── RankDisagreement     two ranks enqueued one collective under different settings
"""

from __future__ import annotations


def reason(error: BaseException) -> str:
    """What went wrong, in one line: of the system's errors its words alone, since whoever tells it names the file."""
    words = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    return " ".join(words.split()) or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)


def printable(text: str) -> str:
    """Text of others, as it may stand in a log: what would steer a terminal as escapes, as JSON writes them."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else f"\\u{ord(one):04x}" for one in text)


class ZerotuneError(Exception):
    """Root of every error raised by this project."""


class UserError(ZerotuneError):
    """Something the user can mend; `str(error)` names the value found, `remedy` what to do.

    The command line prints both on one line and exits with code 2.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


class FabricError(UserError):
    """A fabric file is missing, malformed or physically impossible."""


class TraceError(UserError):
    """A trace file is not of the format it claims, or is broken."""


class TraceAccessError(TraceError):
    """The system does not let a trace file be read: what is in it nobody knows."""


class PlanError(UserError):
    """A plan names an illegal cell, an impossible channel count or overlapping rows."""


class BookError(UserError):
    """A book of the fleet cannot be read, is none, or is not signed by the key that the user pinned."""


class UntrustedError(UserError):
    """Another user has, or could have, put a socket of their own in the place of the daemon's."""


class StoreError(UserError):
    """The store cannot be opened, read or written."""


class StoreVersionError(StoreError):
    """The store was written by a newer zerotune than this one."""


class StoreLockedError(StoreError):
    """Another process owns the store for writing."""


class WireError(ZerotuneError):
    """A frame is malformed, truncated, oversized or of another wire version."""


class PluginError(ZerotuneError):
    """The tuner plugin cannot be built, found or loaded."""


class RankDisagreement(ZerotuneError):
    """Ranks chose different settings for one collective: real NCCL would hang here."""
