"""ZEROTUNE_FAULTS: faults injected for tests.

A comma-separated list of `force:RANK:SETTING` (global rank RANK always runs SETTING), `fail:SETTING` and `hang:SETTING`
(collectives that run SETTING fail, or never end). A setting is `algorithm/protocol`, or
`algorithm/protocol/n_channels` for one channel count only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...store.errors import UserError
from ...store.records import Candidate
from . import catalog


@dataclass(frozen=True)
class Faults:
    """Settings with faults."""

    forced: Mapping[int, Candidate] = field(default_factory=dict)
    """By global rank."""
    failing: tuple[Candidate, ...] = ()
    hanging: tuple[Candidate, ...] = ()


def read_faults(text: str) -> Faults:
    """The faults in `text`; UserError if it has another format."""
    forced: dict[int, Candidate] = {}
    failing: list[Candidate] = []
    hanging: list[Candidate] = []
    for fault in filter(None, text.split(",")):
        try:
            match fault.split(":"):
                case ["force", rank, setting]:
                    forced[int(rank)] = _setting(setting)
                case ["fail", setting]:
                    failing.append(_setting(setting))
                case ["hang", setting]:
                    hanging.append(_setting(setting))
                case _:
                    raise ValueError("no such fault")
        except (UserError, ValueError) as error:
            reason = error.problem if isinstance(error, UserError) else str(error)
            raise UserError(
                f"ZEROTUNE_FAULTS={text!r}: {fault!r} is unknown ({reason})",
                "say force:RANK:SETTING, fail:SETTING or hang:SETTING, with a SETTING such as ring/simple or ring/ll/4",
            ) from None
    return Faults(forced, tuple(failing), tuple(hanging))


def _setting(text: str) -> Candidate:
    words = text.split("/")
    if len(words) not in (2, 3):
        raise ValueError(f"{text!r} is not a setting")
    algorithm, protocol = catalog.parse_algorithm(words[0]), catalog.parse_protocol(words[1])
    return Candidate(algorithm, protocol, int(words[2]) if len(words) == 3 else 0)
