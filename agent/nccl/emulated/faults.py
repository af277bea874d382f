"""Faults injected for tests: settings that one rank is forced to, that fail, or that hang.

`ZEROTUNE_FAULTS` is a comma-separated list of `force:RANK:SETTING` (global rank RANK runs SETTING whatever was
chosen), `fail:SETTING` and `hang:SETTING` (collectives that run SETTING fail, or never end). A setting is
`algorithm/protocol`, or `algorithm/protocol/n_channels` to mean one channel count only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.nccl import catalog
from agent.nccl.emulated.errors import EmulatedNcclError
from store.errors import UserError
from store.records import Candidate


@dataclass(frozen=True)
class _Faults:
    forced: Mapping[int, Candidate] = field(default_factory=dict)
    failing: tuple[Candidate, ...] = ()
    hanging: tuple[Candidate, ...] = ()


_faults: _Faults | None = None


def configure(text: str) -> None:
    """Replace all faults; "" = none. Raises UserError when `text` cannot be read."""
    global _faults
    forced: dict[int, Candidate] = {}
    failing: list[Candidate] = []
    hanging: list[Candidate] = []
    for fault in filter(None, text.split(",")):
        kind, *arguments = fault.split(":")
        try:
            if kind == "force":
                forced[int(arguments[0])] = _setting(arguments[1])
            elif kind in ("fail", "hang"):
                (failing if kind == "fail" else hanging).append(_setting(arguments[0]))
            else:
                raise ValueError(kind)
        except (IndexError, ValueError) as error:
            raise UserError(
                f"fault {fault!r} is unknown ({error})", "say force:RANK:SETTING, fail:SETTING or hang:SETTING"
            ) from None
    _faults = _Faults(forced, tuple(failing), tuple(hanging))


def forced(candidate: Candidate, rank: int) -> Candidate:
    """What global rank `rank` runs in place of `candidate`."""
    faults = _current()
    if not faults.forced:
        return candidate
    other = faults.forced.get(rank)
    if other is None:
        return candidate
    return Candidate(other.algorithm, other.protocol, other.n_channels or candidate.n_channels)


def check(candidate: Candidate) -> None:
    """Raises EmulatedNcclError for a setting that is to fail."""
    if any(_covers(fault, candidate) for fault in _current().failing):
        raise EmulatedNcclError(f"fault injected: {candidate} fails")


def hangs(candidate: Candidate) -> bool:
    """Whether collectives that run `candidate` never end."""
    return any(_covers(fault, candidate) for fault in _current().hanging)


def _current() -> _Faults:
    if _faults is None:
        configure(os.environ.get("ZEROTUNE_FAULTS", ""))
    assert _faults is not None
    return _faults


def _covers(fault: Candidate, candidate: Candidate) -> bool:
    same_cell = (fault.algorithm, fault.protocol) == (candidate.algorithm, candidate.protocol)
    return same_cell and fault.n_channels in (0, candidate.n_channels)


def _setting(text: str) -> Candidate:
    algorithm, protocol, *channels = text.split("/")
    return Candidate(
        catalog.parse_algorithm(algorithm), catalog.parse_protocol(protocol), int(channels[0]) if channels else 0
    )
