"""Which ranks collectives wait for, and which communicators are slower than others of their kind."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

MAX_NAMED: Final = 64
"""More late ranks than this are no stragglers: the whole job is like that."""
Name = Annotated[str, msgspec.Meta(max_length=256)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**32)]
Micros = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class LateRank(msgspec.Struct, frozen=True):
    """A rank, or a whole node, that persistently arrives later at its collectives than most others."""

    rank: Number
    """The rank; for a whole node, its lowest rank."""
    late_us: Micros
    """Median over its late steps of its delay against the other ranks' median, summed over a step."""
    share: Share
    """Share of the recently observed steps in which it was late."""
    since_step: Number
    last_step: Number
    node: Name = ""
    """Host of the rank; empty if its daemon did not send it."""
    is_node: bool = False
    """All ranks of the node are late."""


class SlowCommunicator(msgspec.Struct, frozen=True):
    """A communicator whose calls take longer than the same calls of its siblings, counted from the last arrival on."""

    ranks: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_NAMED)]
    """Observed members; for another node, only the member that arrived last."""
    excess_us: Micros
    """Median over the steps in which it was slow, summed over a step."""
    share: Share
    since_step: Number
    last_step: Number


class Lateness(msgspec.Struct, frozen=True):
    """The waiting of a job's ranks, as one daemon sees it."""

    n_steps: Number = 0
    """Observed steps behind the other fields; 0: nothing is known."""
    wait_us: Micros = 0.0
    """Median over steps of the median rank's waiting for the last arrival in its collectives, summed over a step."""
    transfer_us: Micros = 0.0
    """Median over steps of the collectives' durations from the last arrival on, summed over a step."""
    late: Annotated[tuple[LateRank, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()
    """Ranks that are late now, the latest first."""
    slow: Annotated[tuple[SlowCommunicator, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()
    past: Annotated[tuple[LateRank, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()
    """Ranks that were late and no longer are, the newest first."""

    @property
    def wait_share(self) -> float:
        """Share of the median rank's time in collectives that is waiting, which no setting of NCCL can shorten."""
        whole_us = self.wait_us + self.transfer_us
        return self.wait_us / whole_us if whole_us else 0.0
