"""Faults injected for tests: settings that are forced on a rank, that fail, or that hang."""

from __future__ import annotations

import os

from ....store.records import Candidate
from ..fault_settings import Faults, read_faults
from .errors import EmulatedNcclError

_faults: Faults | None = None


def configure(text: str) -> None:
    """Replace all faults by those in `text`; raises UserError if that is malformed."""
    global _faults
    _faults = read_faults(text)


def forced(candidate: Candidate, rank: int) -> Candidate:
    """The setting that global rank `rank` runs instead of `candidate`."""
    faults = _current()
    if not faults.forced:
        return candidate
    other = faults.forced.get(rank)
    if other is None:
        return candidate
    return Candidate(other.algorithm, other.protocol, other.n_channels or candidate.n_channels)


def check(candidate: Candidate) -> None:
    """Raise EmulatedNcclError for a setting that must fail."""
    if any(_covers(fault, candidate) for fault in _current().failing):
        raise EmulatedNcclError(f"fault injected: {candidate} fails")


def hangs(candidate: Candidate) -> bool:
    """Whether collectives that run `candidate` never end."""
    return any(_covers(fault, candidate) for fault in _current().hanging)


def _current() -> Faults:
    if _faults is None:
        configure(os.environ.get("ZEROTUNE_FAULTS", ""))
    assert _faults is not None
    return _faults


def _covers(fault: Candidate, candidate: Candidate) -> bool:
    same_cell = (fault.algorithm, fault.protocol) == (candidate.algorithm, candidate.protocol)
    return same_cell and fault.n_channels in (0, candidate.n_channels)
