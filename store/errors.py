"""The project's error tree: every error a user can meet descends from `ZerotuneError`.

ZerotuneError
├── UserError            a mistake before training starts: one sentence, a remedy, exit code 2
│   ├── FabricError          a fabric file with impossible values
│   ├── TraceError           a file that is no trace, or a broken trace
│   │   └── TraceAccessError     the system does not let it be read
│   ├── PlanError            a plan with an illegal cell or overlapping rows
│   ├── BookError            a file that is no book, a damaged book, or one that the pinned key did not sign
│   ├── UntrustedError       another user has, or could have, a socket at the daemon's address
│   └── StoreError           the store cannot be used
│       ├── StoreVersionError    written by a newer zerotune
│       └── StoreLockedError     another daemon holds it
├── WireError            a malformed, oversized or wrong-version frame
├── PluginError          the tuner plugin cannot be built or loaded
└── RankDisagreement     two ranks enqueued one collective under different settings
"""

from __future__ import annotations


def reason(error: BaseException) -> str:
    """An error's text in one line; of an OSError only the system's text, as callers name the file themselves."""
    words = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    return " ".join(words.split()) or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)


def printable(text: str) -> str:
    """Text of others, safe for a log: characters that could control a terminal become JSON's escapes."""
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
    """The system refuses to read a trace file, so its content is unknown."""


class PlanError(UserError):
    """A plan names an illegal cell, an impossible channel count or overlapping rows."""


class BookError(UserError):
    """A book cannot be read, the file is no book, or the key that the user pinned did not sign it."""


class UntrustedError(UserError):
    """Another user has replaced the daemon's socket by their own, or could have done it."""


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
