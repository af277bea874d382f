"""Finds the cause if one late rank makes others late.

A rank that waits in one communicator, for a late rank or a slow link, is late in its next one, too. So its lateness is
explained if it waits longer elsewhere than the other members of the communicator do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Final

from .persistence import Excess

EXPLAINS: Final = 0.5
"""Share of a lateness that waits elsewhere must explain."""

Place = tuple[int, int]
"""(communicator, member)."""


def blamed(
    late: Mapping[Place, Excess], members: Sequence[frozenset[int]], slow: Sequence[tuple[frozenset[int], float]]
) -> list[Excess]:
    """The largest unexplained lateness of each member, proven ones first; its `column` is the member.

    An unproven lateness may explain others, too. `slow` has the members of each slow communicator, and its extra time
    per step (us).
    """
    held_up = _held_up(late, members, slow)
    found: dict[int, Excess] = {}
    for (communicator, member), excess in late.items():
        others = [held_up(other, communicator) for other in members[communicator] if other != member]
        explained_us = held_up(member, communicator) - (median(others) if others else 0.0)
        is_explained = explained_us >= EXPLAINS * excess.usual_us
        if not is_explained and (member not in found or _weight(found[member]) < _weight(excess)):
            found[member] = replace(excess, column=member)
    return sorted(found.values(), key=lambda one: -one.excess_us)


def _weight(excess: Excess) -> tuple[bool, float]:
    return excess.is_proven, excess.excess_us


def _held_up(
    late: Mapping[Place, Excess], members: Sequence[frozenset[int]], slow: Sequence[tuple[frozenset[int], float]]
) -> Callable[[int, int], float]:
    """(member, communicator) -> how long it waits for others, or a link, outside this communicator."""
    latest: dict[int, tuple[float, int]] = {}
    for (communicator, member), excess in late.items():
        latest[communicator] = max(latest.get(communicator, (0.0, -1)), (excess.usual_us, member))

    def waits_for(last: int, member: int, communicator: int) -> bool:
        own = late.get((communicator, member))
        return member != last and member in members[communicator] and (own is None or not own.is_proven)

    @cache
    def held_up(member: int, communicator: int) -> float:
        waits = [
            us
            for elsewhere, (us, last) in latest.items()
            if elsewhere != communicator and waits_for(last, member, elsewhere)
        ]
        links = [us for of_link, us in slow if member in of_link and of_link != members[communicator]]
        return max([*waits, *links], default=0.0)

    return held_up
