"""Chooses what a sweep measures next: the whole grid, or only points that can still change a choice."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ....store.records import BASELINE, Candidate, Collective, CommunicatorClass, Outcome
from ...modeling.correction.baked import Correction
from ...modeling.cost_prior import CostPrior
from ...modeling.features import Floats
from ...modeling.posterior import expected_improvement
from . import outliers
from .grid import CONFIDENCE, MIN_REPEATS, GridPoint, Place
from .surrogate import MIN_FREE, USUAL_WEIGHT, Expected, Surrogate, noise_freedom, sample_noise

LOOK_REPEATS: Final = 1
"""Samples of one visit of the active sweep: settings differ far more than samples until few are left."""
BUDGET: Final = 0.125
"""Samples that an active sweep may take, as a share of the full grid's."""
VISIT_OCTAVES: Final = 2.0
"""Distance between the places of one round: a visit changes expectations at nearer places."""
N_DRAWS: Final = 512
ASSUMED_DOUBT: Final = 0.01
"""Least doubt of a choice if too few samples were repeated to show their noise."""
Z_MEDIAN: Final = 3.4
"""Half width of a median's 95 % interval by order statistics in rounds of six, in standard errors of a mean."""
LOOK_SHARE: Final = 0.9
"""Share of the budget for visits to places that were settled by their neighbours alone."""
LOOKS_PER_ROUND: Final = 8
LEAST_WORTH: Final = 1e-4
OWN_WORTH: Final = 3e-3
"""Worth (log) of a look at NCCL's own choice: it changes no choice, but shows a choice's gain."""
OUTLIER_WORTH: Final = 0.1
"""Worth (log) of a second look at a single sample, if it is an outlier; times the share of outliers near it."""
EXCEPTION_SHARE: Final = 0.05
EXCEPTION_STD: Final = 1.0
"""Share of unmeasured algorithms and protocols that differ at a size from its neighbours, and their error (log):
recordings show factors of three to ten, at single sizes.
"""
EXPECTED_SHARE: Final = 0.3
"""A place is also settled if the expected loss is below this share of the precision: ties need no decision."""


class Choice(NamedTuple):
    """A strategy's choice at a place; `candidate` None: no setting works there."""

    candidate: Candidate | None
    expected_us: float
    own_us: float
    """Expected duration of NCCL's own choice."""
    confidence: float
    """Probability that nothing is faster by more than the wanted precision; below 1."""


class Look(NamedTuple):
    """A point worth a look, and its possible gain (log)."""

    point: GridPoint
    worth: float


class Assessment(NamedTuple):
    """One place's next visit (None: settled), its choice's probability of being wrong, and other useful looks."""

    visit: GridPoint | None
    doubt: float
    choice: Choice
    look: Look | None
    first_looks: tuple[Look, ...] = ()
    """One point of each algorithm and protocol that was never measured here and might win."""


class Strategy(Protocol):
    """Chooses rounds of visits until nothing is worth measuring."""

    def choices(self) -> dict[Place, Choice]:
        """The sweep's choice at each place, which may be a point it never measured."""

    def next_round(self) -> list[GridPoint]:
        """The points to visit next, in order; empty: the sweep has ended."""

    def progress(self) -> tuple[int, int]:
        """(done, total), in the strategy's own unit; it may end before all are done."""

    def unsettled(self) -> set[Place]:
        """Places whose choice is uncertain."""

    def expected_us(self) -> dict[tuple[Place, Candidate], float]:
        """Expected times of settings, measured or not; empty: there are no expectations."""


class FullGrid:
    """Visits every point until it is precise; each round visits all others, in a new random order."""

    def __init__(self, points: Sequence[GridPoint], precision: float, max_repeats: int, seed: int = 0) -> None:
        self._points = list(points)
        self._precision, self._max_repeats = precision, max_repeats
        self._chance = random.Random(seed)

    def next_round(self) -> list[GridPoint]:
        """All points that are not precise yet, shuffled, so that drift affects all alike."""
        left = [point for point in self._points if not point.is_done(self._precision, self._max_repeats)]
        self._chance.shuffle(left)
        return left

    def choices(self) -> dict[Place, Choice]:
        """None: the fastest measured point of a place is the choice."""
        return {}

    def progress(self) -> tuple[int, int]:
        """Points done, and all points."""
        done = sum(point.is_done(self._precision, self._max_repeats) for point in self._points)
        return done, len(self._points)

    def unsettled(self) -> set[Place]:
        """Places with points that are not precise yet."""
        return {point.place for point in self._points if not point.is_done(self._precision, self._max_repeats)}

    def expected_us(self) -> dict[tuple[Place, Candidate], float]:
        """Empty: a full grid has no expectations."""
        return {}


class Active:
    """Visits points that can still change a choice, until the choice of every place is settled.

    A place is settled if, with the given confidence, no setting is more than `precision` faster than the chosen one.
    The posterior (surrogate.py) of NCCL's cost and all samples of all sizes decides that. So most points are never
    visited, and a place between two sizes that agree may be settled by them alone. The sweep ends early at its budget,
    a share of the grid's samples. Samples of an earlier full sweep cost no more of it than their places' own share.
    Every choice is a pure function of the samples, so a resumed sweep continues as if it had never ended.
    """

    def __init__(
        self,
        points: Sequence[GridPoint],
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
        self._chance = random.Random(seed)
        self._by_place: dict[Place, list[GridPoint]] = {}
        for point in points:
            self._by_place.setdefault(point.place, []).append(point)
        self._points_of: dict[Collective, list[GridPoint]] = {}
        for point in points:
            self._points_of.setdefault(point.place.collective, []).append(point)
        self._surrogates = [
            (found, Surrogate(found, communicator, costs, correction)) for found in self._points_of.values()
        ]
        self._assessments: dict[Place, Assessment] = {}
        self._means: dict[Place, Floats] = {}
        self._outlier_share = 0.0
        self._roughness: dict[Place, float] = {}

    def next_round(self) -> list[GridPoint]:
        """Visits in random order, at places so far apart that none changes expectations at another."""
        self._judge()
        n_left, first_looks = self._visits_left(self._budget), self._first_looks()
        if n_left <= len(first_looks):  # the rest is for them, as first looks show more than second ones
            visits = first_looks[: min(n_left, LOOKS_PER_ROUND)]
            self._chance.shuffle(visits)
            return visits
        points = [point for found in self._by_place.values() for point in found]
        visits = outliers.contradictions(points) + outliers.leaps(points)
        visits = visits or outliers.rough_looks(self._by_place, self._roughness)
        open_places = [place for place, assessment in self._assessments.items() if assessment.visit is not None]
        for place in sorted(open_places, key=lambda place: (-self._assessments[place].doubt, place)):
            point = self._assessments[place].visit
            assert point is not None
            if all(_are_apart(place, other.place) and not self._is_news_of(point, other) for other in visits):
                visits.append(point)
        visits = (visits or self._looks())[: n_left - len(first_looks)]
        self._chance.shuffle(visits)
        return visits

    def _is_news_of(self, point: GridPoint, other: GridPoint) -> bool:
        """Whether a visit to `other` is the first of its kind, which changes expectations of `point` at any size."""
        if point.place.collective is not other.place.collective or _kind(point) != _kind(other):
            return False
        return not any(
            _kind(one) == _kind(point) and one.duration_us for one in self._points_of[point.place.collective]
        )

    def _visits_left(self, share: float) -> int:
        """Number of visits until `share` of the full grid's samples is used."""
        points = [point for found in self._by_place.values() for point in found]
        n_precise = (Z_MEDIAN * sample_noise([point for point in points if point.duration_us]) / self._precision) ** 2
        n_precise = min(max(MIN_REPEATS, n_precise), self._max_repeats)
        # If samples contradict each other, no interval is narrow enough before the cap.
        n_grid = len(points) * (n_precise + self._outlier_share * (self._max_repeats - n_precise))
        n_looks = sum(len(point.duration_us) - point.n_full_samples for point in points)
        # Places that a full sweep measured use no more than their own share of the budget.
        n_spared = sum(
            min(sum(point.n_full_samples for point in found), share * n_grid * len(found) / len(points))
            for found in self._by_place.values()
        )
        return max(0, int((share * n_grid - n_looks - n_spared) / LOOK_REPEATS))

    def _looks(self) -> list[GridPoint]:
        """Visits to places that were settled by their neighbours alone, while the sweep is a small part of the grid.

        First come choices that were never measured at their place. Then come the likeliest unmeasured rivals of another
        algorithm or protocol, which a smooth model cannot predict. Last come choices with one sample, which may be an
        outlier. A surprise reopens the place. The most doubtful places come first, a few at a time.
        """
        looks = [assessment.look for assessment in self._assessments.values() if assessment.look is not None]
        looks.sort(key=lambda look: (-look.worth, look.point.place))
        return [look.point for look in looks[: min(self._visits_left(self._budget * LOOK_SHARE), LOOKS_PER_ROUND)]]

    def _first_looks(self) -> list[GridPoint]:
        """First looks of all places, the largest possible gain first."""
        looks = [look for assessment in self._assessments.values() for look in assessment.first_looks]
        return [look.point for look in sorted(looks, key=lambda look: (-look.worth, look.point.place))]

    def progress(self) -> tuple[int, int]:
        """Samples taken, and the number of samples that the budget allows."""
        n_taken = sum(len(point.duration_us) for points in self._by_place.values() for point in points)
        return n_taken, n_taken + LOOK_REPEATS * self._visits_left(self._budget)

    def unsettled(self) -> set[Place]:
        """Places with a visit that is still wanted."""
        return {place for place, assessment in self._assessments.items() if assessment.visit is not None}

    def expected_us(self) -> dict[tuple[Place, Candidate], float]:
        """The surrogate's expectation for every setting."""
        return {
            (place, point.candidate): math.exp(log_us)
            for place, means in self._means.items()
            for point, log_us in zip(self._by_place[place], means.tolist(), strict=True)
        }

    def choices(self) -> dict[Place, Choice]:
        """The sweep's choice at each place, measured there or not."""
        self._judge()
        return {place: assessment.choice for place, assessment in self._assessments.items()}

    def _judge(self) -> None:
        self._outlier_share = outliers.outlier_share(point for points in self._points_of.values() for point in points)
        for points, surrogate in self._surrogates:
            self._roughness |= outliers.roughness(points)
            n_free = noise_freedom(points)
            for place, expected in surrogate.expected().items():
                self._means[place] = expected.mean
                self._assessments[place] = self._assess(self._by_place[place], expected, n_free)

    def _assess(self, points: Sequence[GridPoint], expected: Expected, n_free: int) -> Assessment:
        """Assess a place; `n_free`: degrees of freedom of the samples' noise."""
        usable = [index for index, point in enumerate(points) if point.outcome is Outcome.ok]
        if not usable:
            return Assessment(None, 0.0, Choice(None, math.nan, math.nan, 0.0), None)
        rough = self._roughness[points[0].place]
        found = [points[index] for index in usable]
        mean, covariance = expected.mean[usable], expected.covariance[np.ix_(usable, usable)]
        best = int(np.argmin(mean))
        # Only differences matter: an error that all settings of a place share is no doubt about the choice.
        difference = covariance - covariance[:, [best]] - covariance[[best], :] + covariance[best, best]
        lower = np.linalg.cholesky(difference + 1e-10 * np.eye(len(usable)))
        edges = (mean[best] - mean)[None, :] + draw_scales(n_free + USUAL_WEIGHT) * draws(len(usable)) @ lower.T
        edges[:, best] = 0.0
        regret = edges.max(axis=1)
        gains = np.maximum(edges, 0.0).mean(axis=0)
        # The number of draws limits the confidence; so does noise that is only assumed.
        least = 0.5 / (N_DRAWS + 1) if n_free >= MIN_FREE else ASSUMED_DOUBT
        doubt = max(least, float(np.mean(regret > self._precision)))
        own_us = math.exp(expected.mean[0]) if points[0].candidate == BASELINE else math.nan
        choice = Choice(found[best].candidate, math.exp(mean[best]), own_us, 1 - doubt)
        leader = outliers.leader(found) if rough > outliers.ROUGH_SHARE else None
        if leader is not None:
            choice = choice._replace(candidate=leader.candidate, expected_us=leader.median_us)
        is_vague = np.diagonal(difference) > self._precision**2
        seen = {_kind(point) for point in found if point.duration_us}
        is_new = np.array([_kind(point) not in seen for point in found])
        unlike = expected_improvement(mean[best] - mean, np.full(len(found), EXCEPTION_STD))
        gains = gains + EXCEPTION_SHARE * is_new * unlike
        look = _look(found, best, gains, is_vague, OUTLIER_WORTH * rough)
        first = _first_looks([Look(found[at], float(gains[at])) for at in np.flatnonzero(is_new)])
        if doubt <= 1 - CONFIDENCE or float(regret.mean()) <= self._precision * EXPECTED_SHARE:
            return Assessment(None, doubt, choice, look, first)
        pair = sorted((best, int(np.argmax(gains))), key=lambda at: -float(covariance[at, at]))
        open_points = [found[at] for at in pair if len(found[at].duration_us) < self._max_repeats]
        return Assessment(open_points[0] if open_points else None, doubt, choice, look, first)


def _look(
    points: Sequence[GridPoint], best: int, gains: Floats, is_vague: NDArray[np.bool_], again_worth: float
) -> Look | None:
    """A look at an unmeasured choice, else at the best rival of another kind, else at the choice again.

    If `is_vague`, the distance of NCCL's own choice to the choice is unknown, and users read that distance as the gain.
    Rivals that promise more than OWN_WORTH then come before NCCL's own choice, others after it. If samples often
    contradict each other, one sample proves little: `again_worth` is the worth of a second one.
    """
    chosen = points[best]
    if not chosen.duration_us:
        return Look(chosen, math.inf)
    rivals = [
        Look(point, float(gain))
        for point, gain in zip(points, gains, strict=True)
        if not point.duration_us and _kind(point) != _kind(chosen) and gain > LEAST_WORTH
    ]
    rivals += [
        Look(point, OWN_WORTH)
        for point, vague in zip(points, is_vague, strict=True)
        if point.candidate == BASELINE and not point.duration_us and vague
    ]
    if again_worth > LEAST_WORTH:
        rivals += [
            Look(point, again_worth / len(point.duration_us))
            for point in outliers.contenders(points)
            if point.duration_us
        ]
    again = Look(chosen, LEAST_WORTH) if len(chosen.duration_us) < 2 else None
    return max(rivals, key=lambda look: look.worth, default=again)


def _first_looks(looks: Sequence[Look]) -> tuple[Look, ...]:
    """For each algorithm and protocol, the look with the largest possible gain, if any has one."""
    best: dict[tuple[int | None, int | None], Look] = {}
    for look in looks:
        known = best.setdefault(_kind(look.point), look)
        if look.worth > known.worth:
            best[_kind(look.point)] = look
    return tuple(look for look in best.values() if look.worth > LEAST_WORTH)


def _kind(point: GridPoint) -> tuple[int | None, int | None]:
    shown = point.ran or point.candidate
    return shown.algorithm, shown.protocol


def _are_apart(one: Place, other: Place) -> bool:
    if one.collective is not other.collective:
        return True
    return abs(math.log2(one.message_bytes / other.message_bytes)) >= VISIT_OCTAVES


@lru_cache(maxsize=128)
def draws(n_points: int) -> Floats:
    """Fixed standard normal draws, shape (N_DRAWS, n_points): equal samples give equal choices."""
    return np.random.default_rng(n_points).standard_normal((N_DRAWS, n_points))


@lru_cache(maxsize=128)
def draw_scales(n_free: int) -> Floats:
    """Draws of the ratio of true to estimated spread, for `n_free` degrees of freedom, shape (N_DRAWS, 1).

    Normal draws times these are draws of Student's t, as few samples do not show the spread exactly.
    """
    from scipy.special import chdtri  # imported here, as only sweeps need it

    shares = np.random.default_rng(0).permutation((np.arange(N_DRAWS) + 0.5) / N_DRAWS)
    scales: Floats = np.sqrt(n_free / chdtri(n_free, shares))[:, None]
    return scales
