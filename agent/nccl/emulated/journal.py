"""Collectives that ran on this rank, for benchmarks, summaries and tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ....store.records import Candidate, Collective


@dataclass(frozen=True)
class JournalCall:
    """One collective as it ran, in this rank's order of completion."""

    comm_id: int
    sequence: int
    collective: Collective
    message_bytes: int
    candidate: Candidate
    start_us: float
    end_us: float


@dataclass
class Journal:
    """Counts since the process started or since `clear`."""

    counts: Counter[tuple[Collective, int, Candidate]] = field(default_factory=Counter)
    """By (collective, message_bytes, candidate), for collectives with a setting."""
    n_calls: int = 0
    """Completed collectives of any kind."""
    n_disagreements: int = 0
    keep_calls: bool = False
    """True: `calls` is filled, too."""
    calls: list[JournalCall] = field(default_factory=list)

    def clear(self) -> None:
        """Set all counts to 0."""
        self.counts.clear()
        self.calls.clear()
        self.n_calls = self.n_disagreements = 0


_journal = Journal()


def journal() -> Journal:
    """The process's journal."""
    return _journal
