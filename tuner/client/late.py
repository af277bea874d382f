"""Late ranks in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...store.records.lateness import Lateness, LateRank, SlowCommunicator

MOST_NAMED: Final = 6
"""Most ranks in words, the latest first; `--json` has all."""
MOSTLY_WAITING: Final = 0.5
"""From this share of waiting on, late ranks matter more than settings."""


def late(lateness: Lateness) -> Iterator[str]:
    """Sentences about late ranks, slow links and what tuning can still do; none without late ranks or slow links."""
    for one in lateness.late[:MOST_NAMED]:
        yield f"{who(one)} {_arrives(one)}; collectives wait for {'them' if one.is_node else 'it'}"
    if len(lateness.late) > MOST_NAMED:
        yield f"{len(lateness.late) - MOST_NAMED} more ranks are late"
    for link in lateness.slow[:MOST_NAMED]:
        yield (
            f"the communicator of {ranks_of(link)} takes {_ms(link.excess_us)} longer per step than others that do the"
            f" same, in {_percent(link.share)} of steps: a slow link, not a late rank"
        )
    if words := limits(lateness):
        yield words


def limits(lateness: Lateness) -> str:
    """The effects that tuning can and cannot have on lateness; empty without late ranks."""
    if not lateness.late or not lateness.wait_us:
        return ""
    share = lateness.wait_share
    advice = "tuning cannot help with that" if share >= MOSTLY_WAITING else "tuning works on the rest"
    return (
        f"of the {_ms(lateness.wait_us + lateness.transfer_us)} that collectives take per step, {_ms(lateness.wait_us)}"
        f" ({_percent(share)}) are waiting for the last rank: {advice}"
    )


def was_late(lateness: Lateness) -> Iterator[str]:
    """Sentences about ranks that were late earlier."""
    for one in lateness.past[:MOST_NAMED]:
        yield f"{who(one)} arrived {_how_late(one)} to {one.last_step:,}"


def who(one: LateRank) -> str:
    """The rank or node in words."""
    if one.is_node:
        return f"all ranks of node {one.node}" if one.node else f"all ranks of the node of rank {one.rank}"
    return f"rank {one.rank} on {one.node}" if one.node else f"rank {one.rank}"


def ranks_of(link: SlowCommunicator) -> str:
    """The known members in words."""
    shown = ", ".join(map(str, link.ranks[:8]))
    return f"ranks {shown}{' ...' if len(link.ranks) > 8 else ''}"


def _arrives(one: LateRank) -> str:
    return f"arrive{'' if one.is_node else 's'} {_how_late(one)} on"


def _how_late(one: LateRank) -> str:
    return f"{_ms(one.late_us)} late in {_percent(one.share)} of steps, from step {one.since_step:,}"


def _ms(us: float) -> str:
    return f"{us / 1e3:.1f} ms" if us >= 1000 else f"{us:.0f} us"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
