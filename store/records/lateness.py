"""Which ranks collectives wait for, and which communicators are slower than others of their kind."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

MAX_NAMED: Final = 64
"""More late ranks than this are no stragglers but how the job is."""
Name = Annotated[str, msgspec.Meta(max_length=256)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**32)]
Micros = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class LateRank(msgspec.Struct, frozen=True):
    """A rank, or a whole node, that persistently arrives later at its collectives than most others."""

    rank: Number
    """The rank; of a whole node its lowest."""
    late_us: Micros
    """Median over the steps in which it was late: how much later than the median of the others, summed over a step."""
    share: Share
    """Of the observed steps of late, those in which it was late."""
    since_step: Number
    last_step: Number
    node: Name = ""
    """Host of the rank; empty where its daemon did not say."""
    is_node: bool = False
    """All ranks of the node are: none of them in particular."""


class SlowCommunicator(msgspec.Struct, frozen=True):
    """A communicator whose calls take longer than the same calls of its siblings, counted from the last arrival on."""

    ranks: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_NAMED)]
    """Members that were seen; of another node's, the one that arrived last there."""
    excess_us: Micros
    """Median over the steps in which it was slow, summed over a step."""
    share: Share
    since_step: Number
    last_step: Number


class Lateness(msgspec.Struct, frozen=True):
    """What one daemon sees of its job's waiting."""

    n_steps: Number = 0
    """Observed steps that the rest is about; 0: nothing is known."""
    wait_us: Micros = 0.0
    """Median over steps: how long the median rank waited in its collectives for the last one, summed over a step."""
    transfer_us: Micros = 0.0
    """Median over steps: what the collectives took from the last arrival on, summed over a step."""
    late: Annotated[tuple[LateRank, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()
    """Late now, the latest first."""
    slow: Annotated[tuple[SlowCommunicator, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()
    past: Annotated[tuple[LateRank, ...], msgspec.Meta(max_length=MAX_NAMED)] = ()
    """Were late, and are no longer; the newest first."""

    @property
    def wait_share(self) -> float:
        """Of the time that the median rank spends in collectives, what no setting of NCCL can shorten."""
        whole_us = self.wait_us + self.transfer_us
        return self.wait_us / whole_us if whole_us else 0.0
