"""Reasons why a sweep did not visit settings."""

from __future__ import annotations

import enum
import math
from collections.abc import Container, Iterator, Sequence

import msgspec

from ....store.records import Outcome
from .grid import GridPoint
from .strategy import Strategy


class Why(enum.Enum):
    """Why a setting was not visited."""

    slower = "slower"
    """All samples together predict it to be slower than its size's choice by more than the wanted precision."""
    tie = "tie"
    """All samples together predict it to be within the wanted precision of the choice."""
    budget = "budget"
    """Its size's choice is not settled, and the budget's samples were taken."""
    known = "known"
    """An earlier sweep measured it."""
    broken = "broken"
    """It hung, failed or was refused in an earlier sweep, or it or its kind did at other sizes."""
    ended = "ended"
    """The sweep was interrupted, or given up, before its turn."""


class Unvisited(msgspec.Struct, frozen=True):
    """A setting at a size that was not visited."""

    collective: str
    message_bytes: int
    setting: str
    why: Why
    slower_percent: float | None = None
    """Expected slowdown against its size's choice; None: there is no expectation."""


def unvisited(
    points: Sequence[GridPoint],
    visited: Container[int],
    strategy: Strategy,
    precision: float,
    *,
    was_cut: bool,
) -> Iterator[Unvisited]:
    """The points of a sweep that it did not visit, each with the reason, in the order of the grid.

    `was_cut`: the sweep was interrupted or given up.

    Args:
        visited: `id`s of the visited points' Python objects.
        precision: share by which a setting must be slower than the choice to count as slower.
    """
    choices, expected_us, open_places = strategy.choices(), strategy.expected_us(), strategy.unsettled()
    for point in points:
        if id(point) in visited:
            continue
        choice = choices.get(point.place)
        chosen_us = choice.expected_us if choice else math.nan
        ratio = expected_us.get((point.place, point.candidate), math.nan) / chosen_us
        if point.outcome is not Outcome.ok:
            why = Why.broken
        elif point.duration_us:
            why = Why.known
        elif was_cut:
            why = Why.ended
        elif point.place in open_places:
            why = Why.budget
        else:
            why = Why.slower if ratio > 1 + precision else Why.tie
        percent = 100 * (ratio - 1) if math.isfinite(ratio) and why is not Why.broken else None
        yield Unvisited(point.place.collective.name, point.place.message_bytes, str(point.candidate), why, percent)
