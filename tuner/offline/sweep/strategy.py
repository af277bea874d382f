"""What a sweep measures next: the whole grid, or only what can still change the choice."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from zerotune.store.records import BASELINE, Candidate, Collective, CommunicatorClass, Outcome, size_class
from zerotune.tuner.modeling.correction.baked import Correction
from zerotune.tuner.modeling.features import CostPrior, Floats
from zerotune.tuner.offline.sweep import outliers
from zerotune.tuner.offline.sweep.cells import CONFIDENCE, MIN_REPEATS, Cell, Place
from zerotune.tuner.offline.sweep.surrogate import Opinion, Surrogate, sample_noise

LOOK_REPEATS: Final = 1
"""Samples of one visit of the active sweep: settings differ by far more than samples do, until few are left."""
BUDGET: Final = 0.125
"""Samples that an active sweep may take, as a share of those that the full grid would take."""
VISIT_OCTAVES: Final = 2.0
"""Places of one round are this far apart: nearer ones tell about each other."""
N_DRAWS: Final = 512
Z_MEDIAN: Final = 3.4
"""Half width of a median's 95 % interval by order statistics in rounds of six, in standard errors of a mean."""
LOOK_SHARE: Final = 0.9
"""Up to this share of the budget, what neighbours alone have settled is looked at after all."""
LOOKS_PER_ROUND: Final = 8
LEAST_WORTH: Final = 1e-4
OWN_WORTH: Final = 3e-3
"""Of a look at NCCL's own choice, which changes no choice but tells what it gains."""
OUTLIER_WORTH: Final = 0.1
"""Of a second look at a single sample, if it is an outlier; times the share of samples near it that are."""
EXPECTED_SHARE: Final = 0.3
"""Also settled: the expected loss is below this share of the precision (ties need no telling apart)."""
_OWN: Final = 255
"""Algorithm and protocol of a baseline that nobody can tell."""


class Choice(NamedTuple):
    """What a strategy would take at a place; `candidate` None: nothing works there."""

    candidate: Candidate | None
    expected_us: float
    own_us: float
    """Expected duration of NCCL's own choice."""
    confidence: float
    """That nothing is faster by more than the wanted precision."""


class Look(NamedTuple):
    """A cell worth a look, and what it might gain (log)."""

    cell: Cell
    worth: float


class Assessment(NamedTuple):
    """On one place: what to visit next (None: settled), how likely the choice is wrong, what else to look at."""

    visit: Cell | None
    doubt: float
    choice: Choice
    look: Look | None


class Strategy(Protocol):
    """Chooses rounds of visits until there is nothing left worth measuring."""

    def choices(self) -> dict[Place, Choice]:
        """What the sweep chooses at each place, where that may be a cell it never measured."""

    def next_round(self) -> list[Cell]:
        """The cells to visit next, in order; empty when the sweep is over."""

    def progress(self) -> tuple[int, int]:
        """(done, total), in the strategy's own unit; it may end before all are done."""

    def n_unsettled(self) -> int:
        """Places whose choice is not sure yet."""


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

    def choices(self) -> dict[Place, Choice]:
        """None: the fastest measured cell of a place is the choice."""
        return {}

    def progress(self) -> tuple[int, int]:
        """Cells done, and all cells."""
        done = sum(cell.is_done(self._precision, self._max_repeats) for cell in self._cells)
        return done, len(self._cells)

    def n_unsettled(self) -> int:
        """Places with cells that are not precise yet."""
        return len({cell.place for cell in self._cells if not cell.is_done(self._precision, self._max_repeats)})


class Active:
    """Visits what can still change a choice; over when the choice of every place is settled.

    A place is settled when, with the given confidence, no setting is more than `precision` faster than the
    chosen one: in the opinion of a surrogate (surrogate.py) that knows NCCL's cost and all samples of
    all sizes. So most cells are never visited, and a place between two sizes that agree may be settled by them
    alone. It ends early at its budget, a share of the grid's samples; what a full sweep took before at some places
    costs no more of it than those places' own share. Every choice is a pure function of the samples: a resumed sweep
    goes on as if it had never ended.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        communicator: CommunicatorClass,
        costs: CostPrior,
        correction: Correction | None,
        precision: float,
        max_repeats: int,
        budget: float = BUDGET,
        seed: int = 0,
    ) -> None:
        self._budget = budget
        self._precision, self._max_repeats = math.log1p(precision), max_repeats
        self._communicator, self._costs, self._correction = communicator, costs, correction
        self._chance = random.Random(seed)
        self._by_place: dict[Place, list[Cell]] = {}
        for cell in cells:
            self._by_place.setdefault(cell.place, []).append(cell)
        self._cells_of: dict[Collective, list[Cell]] = {}
        for cell in cells:
            self._cells_of.setdefault(cell.place.collective, []).append(cell)
        self._surrogates = [
            (found, Surrogate(found, self._prior_of(found), self._settings(found))) for found in self._cells_of.values()
        ]
        self._verdicts: dict[Place, Assessment] = {}
        self._outlier_share = 0.0
        self._roughness: dict[Place, float] = {}

    def next_round(self) -> list[Cell]:
        """Visits at places far enough apart that none tells about another's, in random order."""
        self._judge()
        cells = [cell for found in self._by_place.values() for cell in found]
        visits = outliers.contradictions(cells) + outliers.leaps(cells)
        visits = visits or outliers.rough_looks(self._by_place, self._roughness)
        open_places = [place for place, verdict in self._verdicts.items() if verdict.visit is not None]
        for place in sorted(open_places, key=lambda place: (-self._verdicts[place].doubt, place)):
            cell = self._verdicts[place].visit
            assert cell is not None
            if all(_are_apart(place, other.place) and not self._is_news_of(cell, other) for other in visits):
                visits.append(cell)
        visits = (visits or self._looks())[: self._visits_left(self._budget)]
        self._chance.shuffle(visits)
        return visits

    def _is_news_of(self, cell: Cell, other: Cell) -> bool:
        """Whether a visit to `other` is the first of its kind, and so tells about `cell` too, at whatever size."""
        if cell.place.collective is not other.place.collective or _kind(cell) != _kind(other):
            return False
        return not any(_kind(one) == _kind(cell) and one.duration_us for one in self._cells_of[cell.place.collective])

    def _visits_left(self, share: float) -> int:
        """How many visits there are until `share` of what the full grid would take is taken."""
        cells = [cell for found in self._by_place.values() for cell in found]
        n_precise = (Z_MEDIAN * sample_noise([cell for cell in cells if cell.duration_us]) / self._precision) ** 2
        n_precise = min(max(MIN_REPEATS, n_precise), self._max_repeats)
        # Where samples contradict each other, no interval closes before the cap.
        n_grid = len(cells) * (n_precise + self._outlier_share * (self._max_repeats - n_precise))
        n_looks = sum(len(cell.duration_us) - cell.n_full_samples for cell in cells)
        # Of places that a full sweep measured, no more than their own share of the budget is spent.
        n_spared = sum(
            min(sum(cell.n_full_samples for cell in found), share * n_grid * len(found) / len(cells))
            for found in self._by_place.values()
        )
        return max(0, int((share * n_grid - n_looks - n_spared) / LOOK_REPEATS))

    def _looks(self) -> list[Cell]:
        """What neighbours alone have settled, looked at after all, while the sweep stays a small part of the grid.

        First choices that were never measured at their place, then the likeliest unmeasured rivals of another
        algorithm or protocol: what a smooth opinion cannot foresee; last, choices of which one sample alone tells,
        for that may have been an outlier. A surprise reopens the place. The most doubtful places go first, a few at
        a time.
        """
        looks = [verdict.look for verdict in self._verdicts.values() if verdict.look is not None]
        looks.sort(key=lambda look: (-look.worth, look.cell.place))
        return [look.cell for look in looks[: min(self._visits_left(self._budget * LOOK_SHARE), LOOKS_PER_ROUND)]]

    def progress(self) -> tuple[int, int]:
        """Samples taken, and those that the budget allows: what is left is at most so much."""
        n_taken = sum(len(cell.duration_us) for cells in self._by_place.values() for cell in cells)
        return n_taken, n_taken + LOOK_REPEATS * self._visits_left(self._budget)

    def n_unsettled(self) -> int:
        """Places with a visit that is still wanted."""
        return sum(verdict.visit is not None for verdict in self._verdicts.values())

    def choices(self) -> dict[Place, Choice]:
        """What the sweep chooses at each place, measured there or not."""
        self._judge()
        return {place: verdict.choice for place, verdict in self._verdicts.items()}

    def _judge(self) -> None:
        self._outlier_share = outliers.outlier_share(cell for cells in self._cells_of.values() for cell in cells)
        for cells, surrogate in self._surrogates:
            self._roughness |= outliers.roughness(cells)
            surrogate.show(self._settings(cells))
            for place, opinion in surrogate.opinions().items():
                self._verdicts[place] = self._verdict(self._by_place[place], opinion)

    def _verdict(self, cells: Sequence[Cell], opinion: Opinion) -> Assessment:
        usable = [index for index, cell in enumerate(cells) if cell.outcome is Outcome.ok]
        if not usable:
            return Assessment(None, 0.0, Choice(None, math.nan, math.nan, 0.0), None)
        rough = self._roughness[cells[0].place]
        found = [cells[index] for index in usable]
        mean, covariance = opinion.mean[usable], opinion.covariance[np.ix_(usable, usable)]
        best = int(np.argmin(mean))
        # Only differences matter: what all settings of a place share is no doubt about the choice.
        difference = covariance - covariance[:, [best]] - covariance[[best], :] + covariance[best, best]
        lower = np.linalg.cholesky(difference + 1e-10 * np.eye(len(usable)))
        edges = (mean[best] - mean)[None, :] + draws(len(usable)) @ lower.T
        edges[:, best] = 0.0
        regret = edges.max(axis=1)
        gains = np.maximum(edges, 0.0).mean(axis=0)
        doubt = float(np.mean(regret > self._precision))
        own_us = math.exp(opinion.mean[0]) if cells[0].candidate == BASELINE else math.nan
        choice = Choice(found[best].candidate, math.exp(mean[best]), own_us, 1 - doubt)
        leader = outliers.leader(found) if rough > outliers.ROUGH_SHARE else None
        if leader is not None:
            choice = choice._replace(candidate=leader.candidate, expected_us=leader.median_us)
        is_vague = np.diagonal(difference) > self._precision**2
        look = _look(found, best, gains, is_vague, OUTLIER_WORTH * rough)
        if doubt <= 1 - CONFIDENCE or float(regret.mean()) <= self._precision * EXPECTED_SHARE:
            return Assessment(None, doubt, choice, look)
        pair = sorted((best, int(np.argmax(gains))), key=lambda at: -float(covariance[at, at]))
        open_cells = [found[at] for at in pair if len(found[at].duration_us) < self._max_repeats]
        return Assessment(open_cells[0] if open_cells else None, doubt, choice, look)

    def _prior_of(self, cells: Sequence[Cell]) -> Floats:
        """Log of NCCL's cost, corrected by what earlier jobs taught; NaN = no idea."""
        prior = np.full(len(cells), np.nan)
        by_place: dict[Place, list[int]] = {}
        for index, cell in enumerate(cells):
            by_place.setdefault(cell.place, []).append(index)
        for place, indices in by_place.items():
            where = self._communicator, place.collective
            candidates = [self._shown(cells[index]) for index in indices]
            nbytes, has_model = np.array([float(place.message_bytes)]), self._correction is not None
            prior[indices] = self._costs.log_cost(*where, candidates, nbytes, described_only=has_model)[0]
            if self._correction is not None:
                shift, _ = self._correction.predict(*where, candidates, np.array([size_class(place.message_bytes)]))
                prior[indices] += shift[0]
        return prior

    def _settings(self, cells: Sequence[Cell]) -> list[tuple[int, int, int]]:
        n_available = self._costs.max_channels(self._communicator)
        found = []
        for cell in cells:
            shown = self._shown(cell)
            kind = (_OWN, _OWN) if shown == BASELINE else (int(shown.algorithm or 0), int(shown.protocol or 0))
            found.append((*kind, shown.n_channels or n_available))
        return found

    def _shown(self, cell: Cell) -> Candidate:
        """What the cell runs: for the baseline what ran, else what NCCL is expected to choose."""
        if cell.candidate != BASELINE:
            return cell.candidate
        default = self._costs.default(self._communicator, cell.place.collective, cell.place.message_bytes)
        return cell.ran or default or BASELINE


def _look(
    cells: Sequence[Cell], best: int, gains: Floats, is_vague: NDArray[np.bool_], again_worth: float
) -> Look | None:
    """The choice if it was never measured here, then the rival of another kind that might gain most, then it again.

    Between rivals of much and of little promise comes NCCL's own choice where `is_vague` says that its distance to the
    choice is not known: that distance is what the sweep is read for. Where samples often contradict each other, single
    ones prove little, for and against: `again_worth` is what a second one is worth.
    """
    chosen = cells[best]
    if not chosen.duration_us:
        return Look(chosen, math.inf)
    rivals = [
        Look(cell, float(gain))
        for cell, gain in zip(cells, gains, strict=True)
        if not cell.duration_us and _kind(cell) != _kind(chosen) and gain > LEAST_WORTH
    ]
    rivals += [
        Look(cell, OWN_WORTH)
        for cell, vague in zip(cells, is_vague, strict=True)
        if cell.candidate == BASELINE and not cell.duration_us and vague
    ]
    if again_worth > LEAST_WORTH:
        rivals += [
            Look(cell, again_worth / len(cell.duration_us)) for cell in outliers.contenders(cells) if cell.duration_us
        ]
    again = Look(chosen, LEAST_WORTH) if len(chosen.duration_us) < 2 else None
    return max(rivals, key=lambda look: look.worth, default=again)


def _kind(cell: Cell) -> tuple[int | None, int | None]:
    shown = cell.ran or cell.candidate
    return shown.algorithm, shown.protocol


def _are_apart(one: Place, other: Place) -> bool:
    if one.collective is not other.collective:
        return True
    return abs(math.log2(one.message_bytes / other.message_bytes)) >= VISIT_OCTAVES


@lru_cache(maxsize=128)
def draws(n_cells: int) -> Floats:
    """Fixed standard normal draws [N_DRAWS, n_cells]: equal samples give equal verdicts."""
    return np.random.default_rng(n_cells).standard_normal((N_DRAWS, n_cells))
