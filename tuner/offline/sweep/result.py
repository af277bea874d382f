"""A sweep's result as rows: by place, the fastest first, rates as nccl-tests computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from ....store.records import BASELINE, Collective, Outcome
from .grid import GridPoint, Place
from .strategy import Choice
from .unvisited import Unvisited


class SweepRow(msgspec.Struct, frozen=True):
    """One point of the result; rates as nccl-tests computes them."""

    collective: str
    message_bytes: int
    setting: str
    n_samples: int
    """Samples taken; 0: the figures follow from neighbours, as nothing was measured at this place."""
    median_us: float | None
    low_us: float | None
    high_us: float | None
    algbw_gbs: float | None
    busbw_gbs: float | None
    gain_percent: float | None
    """Gain over NCCL's own choice at the same place, whose time may be only expected; None: unknown."""
    is_best: bool
    """False also for a guess: neither the choice nor NCCL's own choice was measured at the place."""
    outcome: str
    reason: str = ""
    expected_us: float | None = None
    """Expectation from all samples of the sweep, for the choice, and for NCCL's own choice if not measured."""
    confidence: float | None = None
    """Probability that no setting is faster than the choice by more than the wanted precision."""


class SweepResult(msgspec.Struct, frozen=True):
    """The store's results for this sweep's points."""

    job_id: str
    """The job id under which the sweep was recorded; empty if nothing new was measured."""
    fabric_id: str
    emulated: str
    n_ranks: int
    n_nodes: int
    n_cells: int
    n_places: int
    """Number of sizes times number of collectives."""
    n_visited: int
    n_samples: int
    n_restored: int
    """Samples of earlier sweeps, which were not measured again."""
    n_broken: int
    n_left_out: int
    """Settings never tried, since they or their kind keep hanging or failing."""
    n_unsettled: int
    """Places whose choice is uncertain: the budget was used up, or the sweep was interrupted."""
    wall_s: float
    interrupted: bool
    gave_up: bool
    """Whether the sweep ended early, as too many settings hung or failed."""
    rows: tuple[SweepRow, ...]
    unvisited: tuple[Unvisited, ...] = ()
    """Settings that this sweep did not visit, and why."""

    @property
    def n_compared(self) -> int:
        """Places with a best setting."""
        return sum(row.is_best for row in self.rows)

    def to_json(self) -> str:
        """One JSON document."""
        return msgspec.json.encode(self).decode()


def rows_of(points: Sequence[GridPoint], n_ranks: int, choices: Mapping[Place, Choice] | None = None) -> list[SweepRow]:
    """Rows of the measured or chosen points, and of NCCL's own choice: by place, the fastest first.

    Args:
        choices: an active sweep's; None: the fastest median of a place is the choice.
    """
    choices = choices or {}
    by_place: dict[Place, list[GridPoint]] = {}
    unseen = {point.place for point in points if not (point.is_seen or point.is_left_out)}
    for point in points:
        choice = choices.get(point.place)
        is_judged = choice is not None and point.candidate in (choice.candidate, BASELINE)
        if point.is_seen or is_judged:
            by_place.setdefault(point.place, []).append(point)
    rows = []
    for place in sorted(by_place):
        choice = choices.get(place)
        found = sorted(by_place[place], key=partial(_order_us, choice=choice))
        baseline = next((point for point in found if point.candidate == BASELINE and point.duration_us), None)
        own_us = baseline.median_us if baseline else choice.own_us if choice else math.nan
        # If only some were measured, none is called the best.
        is_compared = len(found) > 1 and place not in unseen
        best = next((point for point in found if point.outcome is Outcome.ok), None) if is_compared else None
        chosen = None
        if choice is not None:
            chosen = next((point for point in found if point.candidate == choice.candidate), None)
            best = chosen or best
        # If neither it nor NCCL's own choice was measured, it is a guess.
        is_guess = chosen is not None and not chosen.duration_us and baseline is None
        for point in found:
            expected_us = None if choice is None else _expected_us(point, choice)
            confidence = choice.confidence if choice is not None and point is best else None
            is_best = point is best and not is_guess
            rows.append(_result_row(point, own_us, expected_us, confidence, is_best, n_ranks))
    return rows


def _order_us(point: GridPoint, choice: Choice | None) -> float:
    if choice is not None and choice.candidate == point.candidate:
        return 0.0
    if point.duration_us:
        return point.median_us
    return math.inf if choice is None or (expected_us := _expected_us(point, choice)) is None else expected_us


def _expected_us(point: GridPoint, choice: Choice) -> float | None:
    """Expected time of the choice, and of a baseline that was not measured."""
    if choice.candidate == point.candidate:
        return choice.expected_us
    is_open = point.candidate == BASELINE and not point.duration_us and point.outcome is Outcome.ok
    return choice.own_us if is_open and math.isfinite(choice.own_us) else None


def _result_row(
    point: GridPoint, own_us: float, expected_us: float | None, confidence: float | None, is_best: bool, n_ranks: int
) -> SweepRow:
    median_us = point.median_us if point.duration_us else None
    shown_us = median_us if median_us is not None else expected_us
    low_us, high_us = point.interval_us
    algbw_gbs = None if shown_us is None else point.place.message_bytes / shown_us / 1e3
    gain = None if shown_us is None or not math.isfinite(own_us) else 100 * (1 - shown_us / own_us)
    return SweepRow(
        collective=point.place.collective.name,
        message_bytes=point.place.message_bytes,
        setting=str(point.candidate),
        n_samples=len(point.duration_us),
        median_us=median_us,
        low_us=low_us if math.isfinite(high_us) else None,
        high_us=high_us if math.isfinite(high_us) else None,
        algbw_gbs=algbw_gbs,
        busbw_gbs=None if algbw_gbs is None else algbw_gbs * bus_factor(point.place.collective, n_ranks),
        gain_percent=gain,
        is_best=is_best,
        outcome=point.outcome.name,
        reason=point.reason,
        expected_us=expected_us,
        confidence=confidence,
    )


def bus_factor(collective: Collective, n_ranks: int) -> float:
    """Ratio of bus to algorithm bandwidth as in nccl-tests (its PERFORMANCE.md)."""
    if collective is Collective.all_reduce:
        return 2 * (n_ranks - 1) / n_ranks
    if collective in (Collective.all_gather, Collective.reduce_scatter):
        return (n_ranks - 1) / n_ranks
    return 1.0
