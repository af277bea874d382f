"""What a sweep measures next: the whole grid, or only what can still change the choice."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

from store.records import BASELINE, Candidate, CommunicatorClass, DecisionKey, Outcome, Phase, size_class
from tuner.features import CostPrior, Floats
from tuner.knowledge import Knowledge
from tuner.policy.posterior import MAX_POINTS, Settings, condition
from tuner.sweep.cells import Cell, Place

LOOK_REPEATS: Final = 3
"""Samples of a first look; only the best of a place and the baseline get more."""
WORTH: Final = 0.015
"""A place is settled when no cell is expected to improve on its best by more than this share."""
CLOSE_PRECISIONS: Final = 3.0
_NOISE: Final = 0.04


class Strategy(Protocol):
    """Chooses rounds of visits until there is nothing left worth measuring."""

    def next_round(self) -> list[Cell]:
        """The cells to visit next, in order; empty when the sweep is over."""

    def progress(self) -> tuple[int, int]:
        """(done, in all), in the strategy's own unit."""


class FullGrid:
    """Every cell until it is precise; each round visits all that are not, in a new random order."""

    def __init__(self, cells: Sequence[Cell], precision: float, max_repeats: int, seed: int = 0) -> None:
        self._cells = list(cells)
        self._precision, self._max_repeats = precision, max_repeats
        self._chance = random.Random(seed)

    def next_round(self) -> list[Cell]:
        """All cells that are not precise yet, shuffled, so that drift hits all alike."""
        left = [cell for cell in self._cells if not cell.is_done(self._precision, self._max_repeats)]
        self._chance.shuffle(left)
        return left

    def progress(self) -> tuple[int, int]:
        """Cells done, and all cells."""
        done = sum(cell.is_done(self._precision, self._max_repeats) for cell in self._cells)
        return done, len(self._cells)


class Active:
    """Per place the cell of most expected improvement, until nothing is expected to improve.

    The opinion about unmeasured cells is NCCL's cost, corrected by what earlier jobs taught, conditioned on
    all that this sweep measured at neighbouring sizes and settings (tuner.policy.posterior).
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        communicator: CommunicatorClass,
        costs: CostPrior,
        knowledge: Knowledge,
        precision: float,
        max_repeats: int,
        seed: int = 0,
    ) -> None:
        self._precision, self._max_repeats = precision, max_repeats
        self._communicator, self._costs, self._knowledge = communicator, costs, knowledge
        self._chance = random.Random(seed)
        self._by_place: dict[Place, list[Cell]] = {}
        for cell in cells:
            self._by_place.setdefault(cell.place, []).append(cell)
        self._settled: set[Place] = set()
        self._prior = {place: self._prior_of(place, found) for place, found in self._by_place.items()}

    def next_round(self) -> list[Cell]:
        """One visit for each place that is not settled, in random order.

        When all are, everything is looked at once more: what neighbours showed since may have reopened it. So
        a sweep that has ended has nothing to do when it is started again.
        """
        visits = self._visits_of_unsettled()
        if not visits:
            self._settled.clear()
            visits = self._visits_of_unsettled()
        self._chance.shuffle(visits)
        return visits

    def _visits_of_unsettled(self) -> list[Cell]:
        visits = []
        for place in self._by_place:
            if place in self._settled:
                continue
            cell = self._next_at(place)
            if cell is None:
                self._settled.add(place)
            else:
                visits.append(cell)
        return visits

    def progress(self) -> tuple[int, int]:
        """Places settled, and all places."""
        return len(self._settled), len(self._by_place)

    def _next_at(self, place: Place) -> Cell | None:
        cells = self._by_place[place]
        baseline = cells[0]
        if baseline.outcome is Outcome.ok and len(baseline.duration_us) < LOOK_REPEATS:
            return baseline
        usable = [cell.outcome is Outcome.ok for cell in cells]
        mean, std = self._posterior(place)
        measured = np.array([len(cell.duration_us) >= LOOK_REPEATS for cell in cells])
        mean = np.where(usable, mean, np.inf)
        if not (measured & usable).any():
            fresh = np.where(measured, np.inf, mean)
            return cells[int(np.argmin(fresh))] if np.isfinite(fresh).any() else None
        medians = np.array([math.log(cell.median_us) if cell.duration_us else math.inf for cell in cells])
        best = int(np.argmin(np.where(measured & np.array(usable), medians, np.inf)))
        improvement = np.where(measured | ~np.isfinite(mean), 0.0, _expected_improvement(medians[best] - mean, std))
        if improvement.max() > WORTH:
            return cells[int(np.argmax(improvement))]
        # The baseline's own precision matters only where it might still be the choice.
        is_close = baseline.duration_us and medians[0] - medians[best] < CLOSE_PRECISIONS * self._precision
        rivals = (cells[best], baseline) if is_close else (cells[best],)
        unsure = [cell for cell in rivals if not cell.is_done(self._precision, self._max_repeats)]
        return min(unsure, key=lambda cell: len(cell.duration_us)) if unsure else None

    def _prior_of(self, place: Place, cells: Sequence[Cell]) -> tuple[Floats, Floats]:
        key = DecisionKey(self._communicator, place.collective, Phase.other, size_class(place.message_bytes))
        prior = self._knowledge.prior(key, place.message_bytes, [cell.candidate for cell in cells], self._costs)
        return prior.mean, prior.std

    def _posterior(self, place: Place) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the log durations at `place`, infinite mean where unavailable."""
        mean, std = self._prior[place]
        near = sorted(
            (other for other in self._by_place if other.collective is place.collective),
            key=lambda other: abs(math.log2(other.message_bytes / place.message_bytes)),
        )
        points: list[tuple[Place, Cell, float, float]] = []
        for other in near:
            prior_mean, prior_std = self._prior[other]
            for index, cell in enumerate(self._by_place[other]):
                if cell.duration_us and np.isfinite(prior_mean[index]):
                    points.append((other, cell, float(prior_mean[index]), float(prior_std[index])))
            if len(points) >= MAX_POINTS:
                break
        usable = np.isfinite(mean)
        targets = self._settings([(place, cell.candidate) for cell in self._by_place[place]])
        found, spread = condition(
            np.where(usable, mean, 0.0),
            std,
            targets,
            self._settings([(other, cell.candidate) for other, cell, _, _ in points]),
            np.array([prior_std for *_, prior_std in points]),
            np.array([math.log(cell.median_us) - prior_mean for _, cell, prior_mean, _ in points]),
            np.array([_NOISE**2 / len(cell.duration_us) for _, cell, _, _ in points]),
        )
        return np.where(usable, found, np.inf), np.where(usable, spread, 1e-3)

    def _settings(self, settings: Sequence[tuple[Place, Candidate]]) -> Settings:
        shown = [
            (place, (self._default(place) if candidate == BASELINE else None) or candidate)
            for place, candidate in settings
        ]
        n_available = self._costs.max_channels(self._communicator)

        def column(values: list[Any], kind: type) -> Any:
            return np.array(values, dtype=kind)

        return Settings(
            log2_bytes=column([math.log2(place.message_bytes) for place, _ in shown], np.float64),
            log2_channels=column([math.log2(one.n_channels or n_available) for _, one in shown], np.float64),
            algorithm=column([-1 if one.algorithm is None else one.algorithm for _, one in shown], np.int64),
            protocol=column([-1 if one.protocol is None else one.protocol for _, one in shown], np.int64),
            key=column([_place_code(place) for place, _ in shown], np.int64),
        )

    def _default(self, place: Place) -> Candidate | None:
        return self._costs.default(self._communicator, place.collective, place.message_bytes)


def _place_code(place: Place) -> int:
    return (place.message_bytes << 4) | int(place.collective)


def _expected_improvement(edge: Floats, spread: Floats) -> Floats:
    """E[max(0, edge + spread * normal)] with edge -inf allowed; both [n]."""
    from scipy.special import ndtr

    finite = np.isfinite(edge)
    scaled = np.where(finite, edge, 0.0) / spread
    density = np.exp(-0.5 * scaled**2) / math.sqrt(2 * math.pi)
    expected: Floats = np.where(finite, scaled * ndtr(scaled) + density, 0.0) * spread
    return expected
